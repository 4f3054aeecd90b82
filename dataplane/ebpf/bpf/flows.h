// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
// Copyright The Fairlead Authors

// What becomes of the packets of a flow at each hook.
//
//	 hook     packet                                becomes
//	 ingress  client ──► service                    client' ──► backend      the flow
//	 egress   client' ──► backend                   node ──► backend         if its source is hidden
//	 ingress  backend ──► node                      backend ──► client'      likewise
//	 egress   backend ──► client'                   service ──► client
//
// client' is the client, with another port if the backend knows that one already from another Service.
//
// The flow has all that the other three say. They are made with BPF_NOEXIST, which is what makes a port belong to one
// flow only, and made again now and then, should the kernel have given their memory to others.
#pragma once

#include "packet.h"

struct translation {
	struct endpoint src;
	struct endpoint dst;
	__u64 last;   // when it was used, by bpf_ktime_get_ns
	__u64 pool;   // its name; the flow only
	__be16 port;  // of the node, that stands for the client; 0: none; the flow only
	__u8 state;   // the bits below
	__u8 pad[5];
};

enum {
	BACK = 1 << 0,	   // from backend to client
	ANSWERED = 1 << 1, // the backend has sent something
	ENDING = 1 << 2,   // one side has
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1);
	__type(key, struct tuple);
	__type(value, struct translation);
} translations SEC(".maps");

const volatile __be32 node_addr4; // what clients are hidden behind
const volatile struct addr node_addr6;
const volatile __u16 ports_first; // ports that no socket of the node is given by itself
const volatile __u16 ports_count;

#define TRIES 32 // to find a port that is free

// As conntrack's defaults, but that a side that ends ends the flow: who still sends keeps it.
static __always_inline __u64 patience(__u8 protocol, __u8 state)
{
	if (protocol == IPPROTO_UDP)
		return 120 * SECOND;
	if (state & ENDING)
		return 120 * SECOND;
	if (!(state & ANSWERED))
		return 60 * SECOND;
	return protocol == IPPROTO_SCTP ? 210 * SECOND : 5 * 24 * 3600 * SECOND;
}

static __always_inline void reverse(struct tuple *out, const struct endpoint *src, const struct endpoint *dst,
				    __u8 protocol, __u8 hook)
{
	out->src = *dst;
	out->dst = *src;
	out->protocol = protocol;
	out->hook = hook;
	out->pad = 0;
}

static __always_inline struct addr node(bool v4)
{
	if (v4)
		return mapped(node_addr4);
	return (struct addr){{node_addr6.word[0], node_addr6.word[1], node_addr6.word[2], node_addr6.word[3]}};
}

static __always_inline bool is_ours(__be16 port)
{
	return (__u16)(bpf_ntohs(port) - ports_first) < ports_count;
}

static __always_inline __be16 any_port(void)
{
	return bpf_htons(ports_first + bpf_get_prandom_u32() % (ports_count ? ports_count : 1));
}

// claim makes a way back, to the port it names or another one that is free. Whoever has one has it alone, until the
// client uses its own port again or the table, which is full, forgets it: nothing looks for flows that have ended.
static __noinline int claim(struct tuple *key, const struct translation *becomes)
{
	if (!key || !becomes)
		return -1;
	struct translation *known = bpf_map_lookup_elem(&translations, key);

	if (known && same(&known->src, &becomes->src) && same(&known->dst, &becomes->dst))
		return 0;
	for (int i = 0; i < TRIES; i++) {
		if (!bpf_map_update_elem(&translations, key, becomes, BPF_NOEXIST))
			return 0;
		key->dst.port = any_port();
	}
	return -1;
}

// lay makes the three translations of a flow that follow from it. flow->port asks for a port if it is not 0, and gets
// the one that is free.
static __noinline int lay(const struct tuple *from, struct translation *flow)
{
	if (!from || !flow)
		return false;
	struct translation t = {.src = from->dst, .dst = from->src, .last = flow->last, .state = BACK};
	struct tuple key;

	reverse(&key, &flow->src, &flow->dst, from->protocol, EGRESS);
	if (claim(&key, &t))
		return false;
	flow->src.port = key.dst.port;
	if (!flow->port)
		return true;
	t.src = flow->dst;
	t.dst = flow->src;
	key.hook = INGRESS;
	key.dst.addr = node(is_ipv4(&flow->src.addr));
	key.dst.port = flow->port;
	if (claim(&key, &t))
		return false;
	flow->port = key.dst.port;
	t.src = key.dst;
	t.dst = flow->dst;
	t.state = 0;
	key = (struct tuple){.src = flow->src, .dst = flow->dst, .protocol = from->protocol, .hook = EGRESS};
	return !bpf_map_update_elem(&translations, &key, &t, BPF_ANY);
}

// drop_back removes a way back that leads to a client, and not one that belongs to somebody else by now.
static __always_inline bool drop_back(const struct tuple *key, const struct endpoint *client)
{
	struct translation *t = bpf_map_lookup_elem(&translations, key);

	return t && same(&t->dst, client) && !bpf_map_delete_elem(&translations, key);
}

// forget removes a flow and what follows from it.
static __noinline int forget(const struct tuple *from, const struct translation *flow)
{
	if (!from || !flow)
		return 0;
	struct tuple key;

	reverse(&key, &flow->src, &flow->dst, from->protocol, EGRESS);
	bool own = drop_back(&key, &from->src);

	if (flow->port) {
		key.dst.addr = node(is_ipv4(&flow->src.addr));
		key.dst.port = flow->port;
		key.hook = INGRESS;
		drop_back(&key, &flow->src);
		reverse(&key, &flow->dst, &flow->src, from->protocol, EGRESS);
		if (own)
			bpf_map_delete_elem(&translations, &key);
	}
	return bpf_map_delete_elem(&translations, from);
}

static __always_inline __u8 state_of(const struct packet *p)
{
	return p->is & (FINAL | RESETS) ? ENDING : 0;
}

// answered lets the flow know that its backend has sent something. What two processors write here at the same time
// may be lost: a flow then is forgotten later.
static __always_inline void answered(const struct translation *back, const struct packet *p, __u64 now)
{
	struct tuple key;

	reverse(&key, &back->src, &back->dst, p->tuple.protocol, INGRESS);
	struct translation *flow = bpf_map_lookup_elem(&translations, &key);

	if (!flow)
		return;
	flow->state |= ANSWERED | state_of(p);
	flow->last = now;
}

// confirm notes that a packet goes back to a client. The first answer counts, and that the flow is not idle; not every
// one.
static __always_inline void confirm(struct translation *back, const struct packet *p)
{
	__u64 now = bpf_ktime_get_ns();

	if (!(back->state & BACK) || (back->state & ANSWERED && now - back->last <= SECOND && !state_of(p)))
		return;
	back->state |= ANSWERED;
	back->last = now;
	answered(back, p, now);
}
