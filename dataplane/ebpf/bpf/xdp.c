// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
// Copyright The Fairlead Authors

// A short way past the stack, for flows that come from outside and go there again.
//
//	device ─► from_outside: known flow, known neighbour ─────────────────────────────► device, this or another one
//	           └─ everything else ─► ingress (tc.c) ─► the stack ─► egress (tc.c) ─► …
//
// It decides nothing. Flows are made by the programs of tc.c, and what these two would do to a packet is done here at
// once: both look-ups, what they write down, one hop, a route. Whatever is not that simple is left to them: new flows,
// what is for this node or its pods, errors, fragments, a neighbour yet to be found, a packet too large for its way. So
// a packet is the same wherever it went, and a device whose driver cannot do this loses nothing but time. What filters
// and counters of the stack do to what is forwarded, they do not do here.
//
// Only what is to be dropped has its end here: a flood of it costs least before there is an skb.
#include "xdp_packet.h"

// A device that has this program.
struct outlet {
	__u8 mac[ETH_ALEN];
	// XDP_TX does not do: what a veth so sends stays, unnoticed, in the queue of an end that has GRO and no program
	// (veth_xdp_flush in drivers/net/veth.c).
	__u8 redirects;
	__u8 pad;
};

// What arrives by one of these may leave by another. A device that is not listed leaves all to the stack.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct outlet);
} outside SEC(".maps");

// add_egress adds to what ingress makes of a packet what egress makes of that.
static __always_inline void add_egress(const struct packet *p, struct translation *to)
{
	struct tuple key = {.src = to->src, .dst = to->dst, .protocol = p->tuple.protocol, .hook = EGRESS};
	struct translation *t = bpf_map_lookup_elem(&translations, &key);

	if (!t)
		return;
	confirm(t, p);
	to->src = t->src;
	to->dst = t->dst;
}

// has_address says whether a neighbour has been found. Before Linux 6.7 one that is only looked for counted as one.
static __always_inline bool has_address(const __u8 *mac)
{
	return mac[0] | mac[1] | mac[2] | mac[3] | mac[4] | mac[5];
}

// find_route asks the kernel which way a packet goes that ingress has translated, and whether it goes at all. It returns
// by what action, XDP_PASS if the stack is needed.
static __always_inline int find_route(struct xdp_md *ctx, const struct packet *p, const struct translation *to,
				      struct bpf_fib_lookup *r)
{
	const struct ethhdr *eth = (void *)(long)ctx->data;
	const struct iphdr *ip = (void *)(eth + 1);
	const __be32 *flow = (void *)(eth + 1);

	if ((void *)(ip + 1) > (void *)(long)ctx->data_end)
		return XDP_PASS;
	r->ifindex = ctx->ingress_ifindex;
	r->l4_protocol = p->tuple.protocol;
	r->sport = to->src.port;
	r->dport = to->dst.port;
	r->tot_len = p->end - p->ip;
	if (p->v4) {
		r->family = AF_INET;
		r->tos = ip->tos;
		r->ipv4_src = to->src.addr.word[3];
		r->ipv4_dst = to->dst.addr.word[3];
	} else {
		r->family = AF_INET6;
		r->flowinfo = *flow & bpf_htonl(0x0fffffff);
		__builtin_memcpy(r->ipv6_src, &to->src.addr, sizeof(struct addr));
		__builtin_memcpy(r->ipv6_dst, &to->dst.addr, sizeof(struct addr));
	}
	if (bpf_fib_lookup(ctx, r, sizeof(*r), 0) != BPF_FIB_LKUP_RET_SUCCESS || !has_address(r->dmac))
		return XDP_PASS;
	struct outlet *out = bpf_map_lookup_elem(&outside, &r->ifindex);

	if (!out)
		return XDP_PASS;
	return r->ifindex == ctx->ingress_ifindex && !out->redirects ? XDP_TX : XDP_REDIRECT;
}

// send has a packet of a known flow leave, to which ingress does what `to` says.
static __noinline int send(struct xdp_md *ctx, const struct packet *p, struct translation *to)
{
	if (!ctx || !p || !to)
		return XDP_PASS;
	struct bpf_fib_lookup route = {};
	int action = find_route(ctx, p, to, &route);

	if (action == XDP_PASS || spoils(ctx, p))
		return XDP_PASS;
	add_egress(p, to);
	if (!write_frame(ctx, p, to, &route))
		return XDP_PASS;
	return action == XDP_REDIRECT ? bpf_redirect(route.ifindex, 0) : action;
}

// unwanted says whether a packet that belongs to no flow is to be dropped. What ingress would refuse or forward, it sees
// itself; most datagrams are for no Service at all, and learn that by one look-up.
static __always_inline bool unwanted(const struct packet *p, struct meeting *m)
{
	struct frontend_key key = {.addr = p->tuple.dst.addr, .port = p->tuple.dst.port, .protocol = p->tuple.protocol};

	if (!(p->is & BEGINS) || (p->tuple.protocol == IPPROTO_UDP && !find_in(&frontends, rows_in_force(), &key)))
		return false;
	meet(p, m, ANYWHERE);
	if (m->target.verdict != DROP)
		return false;
	refused(&p->tuple.dst, p->tuple.protocol, &m->target);
	return true;
}

static __always_inline int serve_outside(struct xdp_md *ctx, const struct outlet *in, struct work *w)
{
	struct packet *p = &w->packet;

	if (!read_frame(ctx, in->mac, p))
		return XDP_PASS;
	p->tuple.hook = INGRESS;
	struct translation *flow = find(p, &w->meeting, ANYWHERE);

	if (!flow)
		return unwanted(p, &w->meeting) ? XDP_DROP : XDP_PASS;
	if (flow->state & (DIRECT | TOLD)) // tc.c knows what to tell, and what was told
		return XDP_PASS;
	w->flow = *flow;
	int action = send(ctx, p, &w->flow);

	if (action != XDP_PASS && !(flow->state & BACK)) // what is left to the stack, ingress counts
		use(p, flow, ticks());
	return action;
}

SEC("xdp")
int from_outside(struct xdp_md *ctx)
{
	__u32 device = ctx->ingress_ifindex;
	struct outlet *in = bpf_map_lookup_elem(&outside, &device);
	struct work *w = in ? begin_work() : 0;

	return in && w ? end_work(w, serve_outside(ctx, in, w)) : XDP_PASS;
}
