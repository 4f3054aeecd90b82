// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
// Copyright The Fairlead Authors

// Packets as a driver has them: Ethernet, IP without options, ports, in one piece of memory. What is otherwise (VLAN
// tags, fragments, extension headers, ICMP) is left to the stack. Knows no Services.
//
// Nothing here is an skb yet, so that nobody keeps account of checksums: they must be whole.
#pragma once

#include "packet.h"

#define ONE_HOP 0x0100 // one hop, in the words of a checksum

// A packet that cannot go over another hop is answered by the stack.
static __always_inline bool read4(const struct iphdr *ip, const void *end, struct packet *p)
{
	p->v4 = true;
	return glance4(ip, end, p) && ip->ttl > 1;
}

static __always_inline bool read6(const struct ipv6hdr *ip, const void *end, struct packet *p)
{
	return glance6(ip, end, p) && ip->hop_limit > 1;
}

// read_l4 reads the ports, and what the packet means to its flow. SCTP is left to the stack: what a new port does to
// its CRC costs more than all else here.
static __always_inline bool read_l4(const void *at, const void *end, struct packet *p)
{
	const struct tcphdr *tcp = at;
	const struct udphdr *udp = at;

	if ((const void *)(udp + 1) > end)
		return false;
	p->tuple.src.port = udp->source;
	p->tuple.dst.port = udp->dest;
	if (p->tuple.protocol == IPPROTO_UDP)
		p->is = BEGINS;
	else if (p->tuple.protocol != IPPROTO_TCP || (const void *)(tcp + 1) > end)
		return false;
	else {
		p->is = meaning(tcp);
		number(p, tcp);
	}
	return true;
}

// read_frame reads a packet that a device at this address has got. It is false for what is left to the stack, and for
// what a switch has sent to everybody.
static __always_inline bool read_frame(const struct xdp_md *ctx, const __u8 *device, struct packet *p)
{
	const void *data = (const void *)(long)ctx->data, *end = (const void *)(long)ctx->data_end;
	const struct ethhdr *eth = data;
	const void *ip = eth + 1;

	if (ip > end || __builtin_memcmp(eth->h_dest, device, ETH_ALEN))
		return false;
	p->ip = sizeof(*eth);
	switch (eth->h_proto) {
	case bpf_htons(ETH_P_IP):
		if (!read4(ip, end, p) || !read_l4(ip + sizeof(struct iphdr), end, p))
			return false;
		break;
	case bpf_htons(ETH_P_IPV6):
		if (!read6(ip, end, p) || !read_l4(ip + sizeof(struct ipv6hdr), end, p))
			return false;
		break;
	default:
		return false;
	}
	return p->l4 < p->end && p->end <= end - data;
}

// turned is a checksum after some words have become others, of which plus is the sum of the new ones and of the
// complements of the old ones (RFC 1624, equation 3).
static __always_inline __u16 turned(__u16 sum, __u64 plus)
{
	return ~fold((__u16)~sum + plus);
}

// plus_of is what another endpoint adds to a checksum. All it has counts, that of IPv4 in words that do not change.
static __always_inline __u64 plus_of(const struct endpoint *from, const struct endpoint *to)
{
	__u64 plus = (__u32)~(__u32)from->port + (__u64)to->port;

	for (int i = 0; i < 4; i++)
		plus += (__u32)~from->addr.word[i] + (__u64)to->addr.word[i];
	return plus;
}

// plus_addr is what an address alone adds to that of IPv4's header.
static __always_inline __u64 plus_addr(const struct endpoint *from, const struct endpoint *to)
{
	return (__u32)~from->addr.word[3] + (__u64)to->addr.word[3];
}

// unfinished says whether a checksum is not yet one but what it begins with, the sum of addresses, protocol and length:
// the sender, on the same machine, counts on a device to do the rest (CHECKSUM_PARTIAL). By chance, one packet in 65,536
// looks like that.
static __always_inline bool unfinished(const struct packet *p, __u16 sum)
{
	__u64 begins = bpf_htons(p->tuple.protocol) + (__u64)bpf_htons(p->end - p->l4);

	for (int i = 0; i < 4; i++)
		begins += (__u64)p->tuple.src.addr.word[i] + p->tuple.dst.addr.word[i];
	return fold(begins) == sum;
}

// checksum finds that of TCP or UDP.
static __always_inline __u16 *checksum(const struct xdp_md *ctx, const struct packet *p)
{
	void *end = (void *)(long)ctx->data_end;
	void *l4 = (void *)(long)ctx->data + sizeof(struct ethhdr) +
		   (p->v4 ? sizeof(struct iphdr) : sizeof(struct ipv6hdr));
	__u16 *sum = p->tuple.protocol == IPPROTO_TCP ? l4 + offsetof(struct tcphdr, check)
						      : l4 + offsetof(struct udphdr, check);

	return (void *)(sum + 1) <= end ? sum : 0;
}

// spoils says whether the packet would be spoilt by new addresses and ports.
static __always_inline bool spoils(const struct xdp_md *ctx, const struct packet *p)
{
	__u16 *sum = checksum(ctx, p);

	return !sum || unfinished(p, *sum);
}

static __always_inline void write_l4(struct udphdr *ports, __u16 *sum, const struct packet *p,
				     const struct endpoint *src, const struct endpoint *dst)
{
	bool udp = p->tuple.protocol == IPPROTO_UDP;

	ports->source = src->port;
	ports->dest = dst->port;
	if (udp && !*sum)
		return; // the sender has none
	*sum = turned(*sum, plus_of(&p->tuple.src, src) + plus_of(&p->tuple.dst, dst));
	if (udp && !*sum)
		*sum = 0xffff;
}

static __always_inline bool write4(struct iphdr *ip, const void *end, const struct packet *p,
				   const struct translation *to)
{
	if ((void *)(ip + 1) > end)
		return false;
	ip->check = turned(ip->check, plus_addr(&p->tuple.src, &to->src) + plus_addr(&p->tuple.dst, &to->dst) +
					      (__u16)~bpf_htons(ONE_HOP));
	ip->ttl--;
	ip->saddr = to->src.addr.word[3];
	ip->daddr = to->dst.addr.word[3];
	return true;
}

static __always_inline bool write6(struct ipv6hdr *ip, const void *end, const struct translation *to)
{
	if ((void *)(ip + 1) > end)
		return false;
	ip->hop_limit--;
	__builtin_memcpy(&ip->saddr, &to->src.addr, sizeof(struct addr));
	__builtin_memcpy(&ip->daddr, &to->dst.addr, sizeof(struct addr));
	return true;
}

// write_frame changes from where to where a packet goes, one hop on, and on Ethernet as the route says. It is false if
// the packet has other headers than were read, which the verifier cannot rule out.
static __always_inline bool write_frame(struct xdp_md *ctx, const struct packet *p, const struct translation *to,
					const struct bpf_fib_lookup *route)
{
	struct ethhdr *eth = (void *)(long)ctx->data;
	const void *end = (void *)(long)ctx->data_end;
	void *ip = eth + 1;
	struct udphdr *ports = ip + (p->v4 ? sizeof(struct iphdr) : sizeof(struct ipv6hdr));
	__u16 *sum = checksum(ctx, p);

	if (!sum || (void *)(ports + 1) > end)
		return false;
	write_l4(ports, sum, p, &to->src, &to->dst);
	if (p->v4 ? !write4(ip, end, p, to) : !write6(ip, end, to))
		return false;
	__builtin_memcpy(eth->h_dest, route->dmac, ETH_ALEN);
	__builtin_memcpy(eth->h_source, route->smac, ETH_ALEN);
	return true;
}
