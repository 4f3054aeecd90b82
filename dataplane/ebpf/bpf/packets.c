// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
// Copyright The Fairlead Authors

// All programs for packets, in one object: they share tables and what they do to a flow.
#include "tc.c"
#include "xdp.c"
