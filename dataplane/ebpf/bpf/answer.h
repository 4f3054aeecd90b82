// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
// Copyright The Fairlead Authors

// What a client hears that is refused: the packet becomes the answer, and goes back through the device it came from.
//
//	TCP     a reset, as of a port where nobody listens
//	others  an ICMP error that quotes the packet's headers: port unreachable; for SCTP in IPv4 protocol
//	        unreachable, which ends an attempt at once where the other one does not
//
// Both come from the address that was asked for, as answers do. Whoever is on the way lets it pass if it would let
// those pass.
//
// The sender of a packet may have left its checksum to a device (CHECKSUM_PARTIAL in the kernel: the packet knows from
// where to sum, and where to write it). No helper tells or ends that. So a reset has its checksum where the packet had
// its own, and what is quoted is such that the device's sum changes nothing. (That of SCTP would. Devices that
// take such packets of SCTP from their senders do not sum them on the way back.)
#pragma once

#include "packet.h"

#define TIME_TO_LIVE 64
#define QUOTED_SCTP 20 // the tag that names an association which is about to begin
#define QUOTED 8
#define QUOTE 96 // at most, with all headers

#define UNREACH_PROTOCOL 2
#define UNREACH_PORT 3
#define UNREACH6_PORT 4

enum {
	RESETS_SENT,
	ERRORS_SENT,
	KINDS,
};

// How many answers the machine gives in a second. Errors are as many as Linux sends (icmp_msgs_per_sec), resets so many
// that clients hardly ever miss one. What is beyond that is a flood, and need not go on to the address it claims to
// be from.
#define RESETS_PER_SECOND 10000
#define ERRORS_PER_SECOND 1000

struct bound {
	__u64 second;
	__u64 sent;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, KINDS);
	__type(key, __u32);
	__type(value, struct bound);
} answers SEC(".maps");

// may_answer is true somewhat more often than that, if processors ask it at the same moment. In a flood they only read,
// and do not wait for each other.
static __always_inline bool may_answer(bool tcp)
{
	__u32 kind = tcp ? RESETS_SENT : ERRORS_SENT;
	struct bound *b = bpf_map_lookup_elem(&answers, &kind);
	__u64 second = bpf_ktime_get_ns() / SECOND;

	if (!b)
		return false;
	if (*(volatile __u64 *)&b->second != second)
		*b = (struct bound){.second = second};
	if (*(volatile __u64 *)&b->sent >= (tcp ? RESETS_PER_SECOND : ERRORS_PER_SECOND))
		return false;
	__sync_fetch_and_add(&b->sent, 1);
	return true;
}

// sum_of goes on with a sum of the Internet.
static __always_inline __u64 sum_of(const void *bytes, __u32 size, __u64 seed)
{
	return seed + (__u32)bpf_csum_diff(0, 0, (__be32 *)bytes, size, 0);
}

// pseudo_sum is that of the pseudo header, the same in both directions.
static __always_inline __u64 pseudo_sum(const struct packet *p, __u8 protocol, __u16 length)
{
	__u64 sum = bpf_htons(protocol) + bpf_htons(length);

	if (p->v4)
		return sum + p->tuple.src.addr.word[3] + p->tuple.dst.addr.word[3];
	sum = sum_of(&p->tuple.src.addr, sizeof(struct addr), sum);
	return sum_of(&p->tuple.dst.addr, sizeof(struct addr), sum);
}

// A checksum, before and after others are added to what it sums: only then a device is not to sum it yet.
enum {
	SUMMED,
	PARTIAL,
	UNREADABLE,
};

static __always_inline int partial(struct __sk_buff *skb, __u32 at)
{
	__u16 before, after;

	if (bpf_skb_load_bytes(skb, at, &before, sizeof(before)) || bpf_l4_csum_replace(skb, at, 0, 1, 2) ||
	    bpf_skb_load_bytes(skb, at, &after, sizeof(after)))
		return UNREADABLE;
	if (before == after)
		return PARTIAL;
	return bpf_skb_store_bytes(skb, at, &before, sizeof(before), 0) ? UNREADABLE : SUMMED;
}

static __always_inline void head4(struct iphdr *ip, const struct packet *p, __u8 protocol, __u16 length)
{
	*ip = (struct iphdr){
		.version = 4, .ihl = 5, .ttl = TIME_TO_LIVE, .protocol = protocol, .frag_off = bpf_htons(0x4000),
		.tot_len = bpf_htons(sizeof(*ip) + length),
		.saddr = p->tuple.dst.addr.word[3], .daddr = p->tuple.src.addr.word[3],
	};
	ip->check = ~fold(sum_of(ip, sizeof(*ip), 0));
}

static __always_inline void head6(struct ipv6hdr *ip, const struct packet *p, __u8 protocol, __u16 length)
{
	*ip = (struct ipv6hdr){
		.version = 6, .hop_limit = TIME_TO_LIVE, .nexthdr = protocol, .payload_len = bpf_htons(length),
	};
	__builtin_memcpy(&ip->saddr, &p->tuple.dst.addr, sizeof(struct addr));
	__builtin_memcpy(&ip->daddr, &p->tuple.src.addr, sizeof(struct addr));
}

// head writes the header of IP before what is there already.
static __always_inline bool head(struct __sk_buff *skb, const struct packet *p, __u8 protocol, __u16 length)
{
	if (p->v4) {
		struct iphdr ip;

		head4(&ip, p, protocol, length);
		return !bpf_skb_store_bytes(skb, p->ip, &ip, sizeof(ip), BPF_F_RECOMPUTE_CSUM);
	}
	struct ipv6hdr ip;

	head6(&ip, p, protocol, length);
	return !bpf_skb_store_bytes(skb, p->ip, &ip, sizeof(ip), BPF_F_RECOMPUTE_CSUM);
}

// reset is as RFC 9293, 3.10.7.1, wants it: for a SYN, which acknowledges nothing.
static __noinline int reset(struct __sk_buff *skb, const struct packet *p)
{
	if (!p)
		return false;
	struct tcphdr was, tcp = {.source = p->tuple.dst.port, .dest = p->tuple.src.port, .doff = 5, .rst = 1, .ack = 1};
	__u32 size = p->v4 ? sizeof(struct iphdr) : sizeof(struct ipv6hdr), l4 = p->ip + size;
	int state = partial(skb, p->l4 + offsetof(struct tcphdr, check));

	if (state == UNREADABLE || (state == PARTIAL && p->l4 != l4) ||
	    bpf_skb_load_bytes(skb, p->l4, &was, sizeof(was)))
		return false;
	tcp.ack_seq = bpf_htonl(bpf_ntohl(was.seq) + was.syn + was.fin + p->end - p->l4 - was.doff * 4);
	__u64 sum = pseudo_sum(p, IPPROTO_TCP, sizeof(tcp));

	tcp.check = state == PARTIAL ? fold(sum) : ~fold(sum_of(&tcp, sizeof(tcp), sum));
	return !bpf_skb_change_tail(skb, l4 + sizeof(tcp), 0) && head(skb, p, IPPROTO_TCP, sizeof(tcp)) &&
	       !bpf_skb_store_bytes(skb, l4, &tcp, sizeof(tcp), BPF_F_RECOMPUTE_CSUM);
}

// settle writes a checksum of UDP, which nobody will look at where it is quoted: the one that the sum of the header
// and itself is again. The header's sum is s; f = -(s + f) in arithmetic modulo 65535, in which half of 1 is 32768.
static __always_inline bool settle(struct __sk_buff *skb, __u32 l4)
{
	struct udphdr udp;

	if (bpf_skb_load_bytes(skb, l4, &udp, sizeof(udp)))
		return false;
	__u32 sum = fold((__u64)udp.source + udp.dest + udp.len);
	__u16 f = (65535 - sum) * 32768 % 65535;

	return !bpf_skb_store_bytes(skb, l4 + offsetof(struct udphdr, check), &f, sizeof(f), 0);
}

struct error {
	__u8 type;
	__u8 code;
	__u16 checksum;
	__u32 unused;
};

// quote is the sum of what an error quotes: so many bytes. Verifiers before Linux 6.8 do not learn from "is not 0", but that
// what is 1 more than a number below QUOTE is a size; the empty instruction keeps the compiler from knowing better.
static __noinline int quote(struct __sk_buff *skb, __u32 at, __u32 size, __u64 *sum)
{
	__u8 bytes[QUOTE] = {};
	__u32 last = size - 1;

	asm volatile("" : "+r"(last));
	if (!sum || last >= sizeof(bytes) || bpf_skb_load_bytes(skb, at, bytes, last + 1))
		return false;
	*sum = sum_of(bytes, last + 1, *sum);
	return true;
}

// unreachable makes room for an error before the packet, of which headers are left.
static __noinline int unreachable(struct __sk_buff *skb, const struct packet *p)
{
	if (!p)
		return false;
	__u8 protocol = p->v4 ? IPPROTO_ICMP : IPPROTO_ICMPV6;
	bool sctp = p->tuple.protocol == IPPROTO_SCTP;
	__u32 size = p->l4 - p->ip + (sctp ? QUOTED_SCTP : QUOTED);
	struct error e = {.type = p->v4 ? DEST_UNREACH : DEST_UNREACH6,
			  .code = !p->v4 ? UNREACH6_PORT : sctp ? UNREACH_PROTOCOL : UNREACH_PORT};
	__u32 room = sizeof(e) + (p->v4 ? sizeof(struct iphdr) : sizeof(struct ipv6hdr));
	__u64 sum = p->v4 ? 0 : pseudo_sum(p, protocol, sizeof(e) + size);

	if (p->tuple.protocol == IPPROTO_UDP) {
		int state = partial(skb, p->l4 + offsetof(struct udphdr, check));

		if (state == UNREADABLE || (state == PARTIAL && !settle(skb, p->l4)))
			return false;
	}
	sum = sum_of(&e, sizeof(e), sum);
	if (!quote(skb, p->ip, size, &sum))
		return false;
	e.checksum = ~fold(sum);
	return !bpf_skb_change_tail(skb, p->ip + size, 0) &&
	       !bpf_skb_adjust_room(skb, room, BPF_ADJ_ROOM_MAC, 0) &&
	       head(skb, p, protocol, sizeof(e) + size) &&
	       !bpf_skb_store_bytes(skb, p->ip + room - sizeof(e), &e, sizeof(e), BPF_F_RECOMPUTE_CSUM);
}

// swap_macs sends a frame back to where it came from. Devices without Ethernet have nothing to swap.
static __always_inline bool swap_macs(struct __sk_buff *skb)
{
	struct ethhdr from, to;

	if (link_header != ETH_HLEN)
		return true;
	if (bpf_skb_load_bytes(skb, 0, &from, sizeof(from)))
		return false;
	to = from;
	__builtin_memcpy(to.h_dest, from.h_source, ETH_ALEN);
	__builtin_memcpy(to.h_source, from.h_dest, ETH_ALEN);
	return !bpf_skb_store_bytes(skb, 0, &to, sizeof(to), 0);
}

// refuse answers a packet, which ends it.
static __noinline int refuse(struct __sk_buff *skb, const struct packet *p)
{
	if (!p)
		return TC_ACT_SHOT;
	bool tcp = p->tuple.protocol == IPPROTO_TCP;

	if (!may_answer(tcp) || !(tcp ? reset(skb, p) : unreachable(skb, p)) || !swap_macs(skb))
		return TC_ACT_SHOT;
	return bpf_redirect(skb->ifindex, 0);
}
