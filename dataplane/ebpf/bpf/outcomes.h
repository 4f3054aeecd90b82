// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
// Copyright The Fairlead Authors

// Programs tell the agent the outcomes of connections that begin: each failure, and answers while the agent asks for
// them. Where the ring is full, they tell no more.
#pragma once

#include "maps.h"

enum result {
	IS_ANSWERED,
	IS_UNANSWERED,
	IS_REFUSED,
};
GO(result);

struct outcome {
	struct endpoint to; // as the client asked for
	struct endpoint backend;
	struct addr client;
	__u8 protocol;
	__u8 result;
	__u16 pad;
};
const struct outcome *go_outcome SEC("go");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 18);
} outcomes SEC(".maps");

// wants_answers says whether the agent wants to hear of connections that are answered.
static __always_inline bool wants_answers(void)
{
	return *(volatile __u32 *)&current.answers;
}

static __noinline int report(const struct endpoint *to, const struct endpoint *backend, const struct addr *client,
			   __u8 protocol, __u8 result)
{
	struct outcome *o = bpf_ringbuf_reserve(&outcomes, sizeof(*o), 0);

	if (!o)
		return 0;
	if (!to || !backend || !client) {
		bpf_ringbuf_discard(o, BPF_RB_NO_WAKEUP);
		return 0;
	}
	o->to = *to;
	o->backend = *backend;
	o->client = *client;
	o->protocol = protocol;
	o->result = result;
	o->pad = 0;
	bpf_ringbuf_submit(o, BPF_RB_NO_WAKEUP);
	return 0;
}
