// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
// Copyright The Fairlead Authors

// Direct answers (DSR): a client that would be hidden keeps its address, and the backend's node answers as the Service.
//
//	client ──► service: this node                  ingress: client ──► backend, as if nobody were hidden
//	                                               egress:  what may begin a flow says for which service it is
//	client ──► backend, for service: its node      ingress: lays the flow as if it had come here for the service
//	backend ──► client                             egress:  service ──► client, past the first node
//
// The address and port travel in an option of IPv4, or one for the destination in IPv6, of the types that RFC 4727
// keeps for experiments: those who do not know them pass them on. TCP has it in each SYN. No answer passes the first
// node to tell it that a datagram has arrived, so those of UDP have it all, but for those that leave no room.
//
// A flow whose first packet leaves no room is hidden. So is one whose client would have to have another port, as the
// backend knows its own from another Service.
#pragma once

#include "flows.h"

#define OPTION4 0x9e // copied into fragments; 30: for experiments
#define OPTION6 0x1e // skipped by whoever does not know it; likewise

// The largest packet that all devices take; 0: clients are hidden.
const volatile __u32 direct_mtu;

struct option4 {
	__u8 type, length;
	__be16 port;
	__be32 addr;
};

struct option6 {
	__u8 next, size;   // of the header: 8 bytes less than it has, in units of 8
	__u8 type, length; // of the option
	__be16 port;
	__u16 pad;
	struct addr addr;
};

static __always_inline __u32 option_size(const struct packet *p)
{
	return p->v4 ? sizeof(struct option4) : sizeof(struct option6);
}

static __always_inline bool has_room(const struct packet *p)
{
	return p->plain && p->segments <= 1 && p->end - p->ip + option_size(p) <= direct_mtu;
}

// answers_directly says of a flow whose client is to be hidden whether it need not be, as the backend's node can answer.
// Clients that are hidden for another reason than that answers pass here, are.
static __always_inline bool answers_directly(const struct packet *p, __u8 flags, bool pod, const struct addr *backend)
{
	if (!direct_mtu || pod || !(flags & SNAT_OFFCLUSTER) || same_addr(backend, &p->tuple.src.addr))
		return false;
	return (p->tuple.protocol == IPPROTO_TCP || p->tuple.protocol == IPPROTO_UDP) && has_room(p);
}

static __always_inline bool tell4(struct __sk_buff *skb, const struct packet *p, const struct endpoint *service)
{
	struct option4 option = {OPTION4, sizeof(option), service->port, service->addr.word[3]};
	struct iphdr ip;

	if (bpf_skb_load_bytes(skb, p->ip, &ip, sizeof(ip)))
		return false;
	ip.ihl += sizeof(option) / 4;
	ip.tot_len = bpf_htons(bpf_ntohs(ip.tot_len) + sizeof(option));
	ip.check = 0;
	__u64 sum = (__u32)bpf_csum_diff(0, 0, (__be32 *)&ip, sizeof(ip), 0);

	ip.check = ~fold((__u32)bpf_csum_diff(0, 0, (__be32 *)&option, sizeof(option), 0) + sum);
	return !bpf_skb_store_bytes(skb, p->ip, &ip, sizeof(ip), BPF_F_RECOMPUTE_CSUM) &&
	       !bpf_skb_store_bytes(skb, p->ip + sizeof(ip), &option, sizeof(option), BPF_F_RECOMPUTE_CSUM);
}

static __always_inline bool tell6(struct __sk_buff *skb, const struct packet *p, const struct endpoint *service)
{
	struct option6 option = {.size = sizeof(option) / 8 - 1, .type = OPTION6, .port = service->port,
				 .addr = service->addr};
	struct ipv6hdr ip;

	option.length = sizeof(option) - offsetof(struct option6, port);
	if (bpf_skb_load_bytes(skb, p->ip, &ip, sizeof(ip)))
		return false;
	option.next = ip.nexthdr;
	ip.nexthdr = IPPROTO_DSTOPTS;
	ip.payload_len = bpf_htons(bpf_ntohs(ip.payload_len) + sizeof(option));
	return !bpf_skb_store_bytes(skb, p->ip, &ip, sizeof(ip), BPF_F_RECOMPUTE_CSUM) &&
	       !bpf_skb_store_bytes(skb, p->ip + sizeof(ip), &option, sizeof(option), BPF_F_RECOMPUTE_CSUM);
}

// tell adds the service to a packet for a backend. It is false if the packet is spoilt: the room is there, but not what
// belongs into it. A packet that gets no room goes on without.
static __noinline int tell(struct __sk_buff *skb, const struct packet *p, const struct endpoint *service)
{
	if (!p || !service)
		return false;
	if (!has_room(p) || bpf_skb_adjust_room(skb, option_size(p), BPF_ADJ_ROOM_NET, 0))
		return true;
	return p->v4 ? tell4(skb, p, service) : tell6(skb, p, service);
}

// says finds for which service a packet is. It is false for those that do not say it.
static __always_inline bool says(struct __sk_buff *skb, const struct packet *p, struct endpoint *service)
{
	if (p->v4) {
		struct option4 option;

		if (p->l4 - p->ip != sizeof(struct iphdr) + sizeof(option) ||
		    bpf_skb_load_bytes(skb, p->ip + sizeof(struct iphdr), &option, sizeof(option)) ||
		    option.type != OPTION4 || option.length != sizeof(option))
			return false;
		service->addr = mapped(option.addr);
		service->port = option.port;
		return true;
	}
	struct option6 option;

	if (p->l4 - p->ip != sizeof(struct ipv6hdr) + sizeof(option) ||
	    bpf_skb_load_bytes(skb, p->ip + sizeof(struct ipv6hdr), &option, sizeof(option)) ||
	    option.size != sizeof(option) / 8 - 1 || option.type != OPTION6 ||
	    option.length != sizeof(option) - offsetof(struct option6, port))
		return false;
	service->addr = option.addr;
	service->port = option.port;
	return true;
}

// is_again says whether a flow is known that a packet tells of once more. To whom an open one leads does not change by
// what only says so.
static __always_inline bool is_again(struct translation *flow, const struct packet *p, const struct endpoint *backend)
{
	__u32 now = ticks();
	bool tcp = p->tuple.protocol == IPPROTO_TCP, lasting = tcp && flow->state & LASTING && !is_closed(flow->state);

	if (lasting && (same(&flow->dst, backend) || !insists(flow, now))) {
		ask_anew(p, flow);
		return true;
	}
	if (!same(&flow->dst, backend) || (tcp && is_closed(flow->state)) || quiet(flow, now) > 10 * TICKS)
		return false;
	if (quiet(flow, now) < TICKS)
		return true;
	flow->state |= !tcp && flow->state & ANSWERED ? LASTING : 0;
	flow->last = now;
	return true;
}

// heard notes at the backend's node what a client does to a flow whose packets come for the backend: t has them.
static __always_inline void heard(const struct packet *p, struct translation *t)
{
	struct tuple key = {.src = p->tuple.src, .dst = t->src, .protocol = p->tuple.protocol, .hook = INGRESS};

	follow(t, p);
	if (p->tuple.protocol != IPPROTO_TCP || (t->state & LASTING && !(p->is & (FINAL | RESETS))))
		return;
	struct translation *flow = bpf_map_lookup_elem(&translations, &key);

	if (!flow)
		return;
	flow->state = progress(p, flow->state, CLIENT_ENDS, quiet(flow, ticks()), believed(p, t, 0) || believed(p, flow, 0));
	if (shows(p, flow->state))
		prove(p, flow);
	t->state |= flow->state & LASTING;
}
