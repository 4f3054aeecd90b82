// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
// Copyright The Fairlead Authors

// Packets and bytes between clients and a backend. Programs for packets and programs for sockets add to the same table.
#pragma once

#include "maps.h"

struct traffic_key {
	__u64 pool; // its name
	struct endpoint backend;
	__u32 pad;
};

enum direction {
	TO_BACKEND,
	TO_CLIENT,
	DIRECTIONS,
};
GO(direction);

struct traffic {
	__u64 packets[DIRECTIONS];
	__u64 bytes[DIRECTIONS];
};

static const struct traffic no_traffic;

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1);
	__type(key, struct traffic_key);
	__type(value, struct traffic);
} traffic SEC(".maps");

static __always_inline void add_traffic(const struct traffic_key *key, enum direction way, __u64 packets, __u64 bytes)
{
	struct traffic *sum = bpf_map_lookup_elem(&traffic, key);

	if (!sum) {
		bpf_map_update_elem(&traffic, key, &no_traffic, BPF_NOEXIST);
		sum = bpf_map_lookup_elem(&traffic, key);
	}
	if (!sum || way >= DIRECTIONS)
		return;
	__sync_fetch_and_add(&sum->packets[way], packets);
	__sync_fetch_and_add(&sum->bytes[way], bytes);
}
