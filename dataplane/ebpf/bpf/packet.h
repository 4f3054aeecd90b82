// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
// Copyright The Fairlead Authors

// Packets: from where to where they go, and how to change that. Knows no Services.
//
// What almost all packets are (TCP and UDP behind a header without options, in memory that is at hand) is read and written
// in place. All else is by helpers, which find the bytes wherever the kernel keeps them. What cannot be understood completely (a routing header, more extension headers than anybody sends, a header cut off) is no packet
// of ours.
#pragma once

#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include "balance.h"

// Functions of numbers alone are global (not static): the verifier looks at such a one once, and not for each call.

#define AF_INET 2
#define AF_INET6 10

#define IP_MORE_FRAGMENTS 0x2000
#define IP_FRAGMENT_OFFSET 0x1fff
#define IP6_MORE_FRAGMENTS 1
#define IP6_FRAGMENT_OFFSET 0xfff8

#define EXTENSIONS 6 // headers between that of IPv6 and the ports; RFC 8200 knows as many that may come before them

#define SCTP_INIT 1
#define SCTP_INIT_ACK 2
#define SCTP_ABORT 6
#define SCTP_SHUTDOWN_COMPLETE 14

// Of ICMP, in both versions alike: how long its header is, and where the checksum. The kernel's header of ICMP includes
// that of the C library.
#define ICMP_HEADER 8
#define ICMP_CHECKSUM 2

enum icmp_error {
	DEST_UNREACH = 3,
	TIME_EXCEEDED = 11,
	PARAMETER_PROBLEM = 12,
	DEST_UNREACH6 = 1,
	PARAMETER_PROBLEM6 = 4,
};

#define TOO_LONG 4 // code of DEST_UNREACH

#define ECHO 8
#define ECHO6 128

// Linux 6.16 and its stable siblings: the flag of bpf_l4_csum_replace for IPv6, which has no header checksum.
#define CSUM_IPV6 (1ULL << 7)

// Of the device's link layer: 14 for Ethernet, 0 for devices that have none.
const volatile __u32 link_header = ETH_HLEN;

enum hook {
	INGRESS = 1, // before the stack routes it
	EGRESS = 2,  // after
} __attribute__((packed));

// Where a packet comes from and where it goes, as it passes a hook.
struct tuple {
	struct endpoint src;
	struct endpoint dst;
	__u8 protocol;
	enum hook hook;
	__u16 pad;
};

enum {
	BEGINS = 1 << 0, // a flow; all others of TCP and SCTP belong to one
	FINAL = 1 << 1,	 // FIN
	RESETS = 1 << 2, // RST, or what ends an association
	LATER = 1 << 3,	 // a fragment that is not the first, and has no ports
	FIRST = 1 << 4,	 // one that has them
	ERROR = 1 << 5,	 // ICMP, about another packet
	ASKS = 1 << 6,	 // ICMP, for an echo: it is never forwarded, but may be refused
	ACCEPTS = 1 << 7, // what began: SYN and ACK, or INIT ACK
};

struct packet {
	struct tuple tuple;
	__u32 ip;	// where its header begins
	__u32 l4;	// where that of its protocol begins
	__u32 end;	// where it ends
	__u32 fragment; // what the fragments of a datagram have in common
	__u32 seq;	// TCP: where in the sender's sequence it begins
	__u32 next;	// and where what comes after it does; SCTP: the tag that the other side is to use
	__u32 ack;	// what it acknowledges; SCTP: the tag that it has
	__u16 segments; // that devices will make of it; 0: not known to be several
	__u8 is;	// the bits above
	__u8 v4 : 1;
	__u8 plain : 1; // it was read in place
};

struct fragment_key {
	struct addr src;
	struct addr dst;
	__u32 id;
	__u8 protocol;
	__u8 pad[3];
};

struct ports {
	__be16 src;
	__be16 dst;
};

// The ports of a fragmented datagram, which its first fragment has told.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1);
	__type(key, struct fragment_key);
	__type(value, struct ports);
} fragments SEC(".maps");

// fold makes 16 bits of a sum of the Internet.
static __always_inline __u16 fold(__u64 sum)
{
	sum = (sum >> 32) + (sum & 0xffffffff);
	sum = (sum >> 16) + (sum & 0xffff);
	sum = (sum >> 16) + (sum & 0xffff);
	return (sum >> 16) + (sum & 0xffff);
}

static __always_inline struct addr mapped(__be32 v4)
{
	return (struct addr){{0, 0, bpf_htonl(0xffff), v4}};
}

static __always_inline bool parse4(struct __sk_buff *skb, struct packet *p)
{
	struct iphdr ip;

	if (bpf_skb_load_bytes(skb, p->ip, &ip, sizeof(ip)) || ip.version != 4 || ip.ihl < 5)
		return false;
	__u16 offset = bpf_ntohs(ip.frag_off);

	p->tuple.src.addr = mapped(ip.saddr);
	p->tuple.dst.addr = mapped(ip.daddr);
	p->tuple.protocol = ip.protocol;
	p->l4 = p->ip + ip.ihl * 4;
	p->end = p->ip + bpf_ntohs(ip.tot_len);
	p->fragment = ip.id;
	if (offset & IP_FRAGMENT_OFFSET)
		p->is |= LATER;
	else if (offset & IP_MORE_FRAGMENTS)
		p->is |= FIRST;
	return true;
}

static __always_inline bool extension(struct __sk_buff *skb, struct packet *p, __u8 *next)
{
	struct {
		__u8 next, length;
		__be16 offset;
		__be32 id;
	} header;

	if (bpf_skb_load_bytes(skb, p->l4, &header, sizeof(header)))
		return false;
	switch (*next) {
	case IPPROTO_HOPOPTS:
	case IPPROTO_DSTOPTS:
		p->l4 += (header.length + 1) * 8;
		break;
	case IPPROTO_AH:
		p->l4 += (header.length + 2) * 4;
		break;
	case IPPROTO_FRAGMENT:
		p->l4 += 8;
		p->fragment = header.id;
		if (header.offset & bpf_htons(IP6_FRAGMENT_OFFSET))
			p->is |= LATER;
		else if (header.offset & bpf_htons(IP6_MORE_FRAGMENTS))
			p->is |= FIRST;
		break;
	}
	*next = header.next;
	return true;
}

// disguised says whether an address in a packet of IPv6 is one of IPv4, which is mapped. No such packet is to be on a wire:
// the tables would take it for one of IPv4, and its sender for whom it names.
static __always_inline bool disguised(const struct tuple *t)
{
	return is_ipv4(&t->src.addr) || is_ipv4(&t->dst.addr);
}

static __always_inline bool parse6(struct __sk_buff *skb, struct packet *p)
{
	struct ipv6hdr ip;

	if (bpf_skb_load_bytes(skb, p->ip, &ip, sizeof(ip)) || ip.version != 6)
		return false;
	__u8 next = ip.nexthdr;

	__builtin_memcpy(&p->tuple.src.addr, &ip.saddr, sizeof(struct addr));
	__builtin_memcpy(&p->tuple.dst.addr, &ip.daddr, sizeof(struct addr));
	if (disguised(&p->tuple))
		return false;
	p->l4 = p->ip + sizeof(ip);
	p->end = p->l4 + bpf_ntohs(ip.payload_len);
	for (int i = 0; i < EXTENSIONS; i++) {
		if (next != IPPROTO_HOPOPTS && next != IPPROTO_DSTOPTS && next != IPPROTO_AH &&
		    next != IPPROTO_FRAGMENT)
			break;
		if (p->is & LATER || !extension(skb, p, &next))
			break;
	}
	p->tuple.protocol = next;
	return true;
}

static __always_inline bool is_error(const struct packet *p, __u8 type)
{
	if (p->v4)
		return type == DEST_UNREACH || type == TIME_EXCEEDED || type == PARAMETER_PROBLEM;
	return type >= DEST_UNREACH6 && type <= PARAMETER_PROBLEM6;
}

static __always_inline __u8 meaning(const struct tcphdr *tcp)
{
	return (tcp->syn && !tcp->ack ? BEGINS : 0) | (tcp->syn && tcp->ack ? ACCEPTS : 0) | (tcp->fin ? FINAL : 0) |
	       (tcp->rst ? RESETS : 0);
}

// number reads where a segment is in its connection.
static __always_inline void number(struct packet *p, const struct tcphdr *tcp)
{
	p->seq = bpf_ntohl(tcp->seq);
	p->next = p->seq + p->end - p->l4 - tcp->doff * 4 + tcp->syn + tcp->fin;
	p->ack = bpf_ntohl(tcp->ack_seq);
}

// An ICMP error may hold no more than the ports.
static __always_inline void parse_tcp(struct __sk_buff *skb, struct packet *p)
{
	struct tcphdr tcp;

	if (bpf_skb_load_bytes(skb, p->l4, &tcp, sizeof(tcp)))
		return;
	p->is |= meaning(&tcp);
	number(p, &tcp);
}

static __always_inline void parse_sctp(struct __sk_buff *skb, struct packet *p)
{
	struct {
		struct ports ports;
		__be32 tag, checksum;
		__u8 chunk, flags;
		__be16 length;
	} sctp;
	__be32 tag;

	if (bpf_skb_load_bytes(skb, p->l4, &sctp, sizeof(sctp)))
		return;
	p->is |= sctp.chunk == SCTP_INIT ? BEGINS : 0;
	p->is |= sctp.chunk == SCTP_INIT_ACK ? ACCEPTS : 0;
	p->is |= sctp.chunk == SCTP_ABORT || sctp.chunk == SCTP_SHUTDOWN_COMPLETE ? RESETS : 0;
	p->ack = bpf_ntohl(sctp.tag);
	if (p->is & (BEGINS | ACCEPTS) && !bpf_skb_load_bytes(skb, p->l4 + sizeof(sctp), &tag, sizeof(tag)))
		p->next = bpf_ntohl(tag);
}

// parse_l4 reads the ports, and what the packet means to its flow. It is false for what has no ports.
static __always_inline bool parse_l4(struct __sk_buff *skb, struct packet *p)
{
	struct ports ports;
	__u8 byte = 0;

	switch (p->tuple.protocol) {
	case IPPROTO_TCP:
		parse_tcp(skb, p);
		break;
	case IPPROTO_SCTP:
		parse_sctp(skb, p);
		break;
	case IPPROTO_UDP:
		p->is |= BEGINS;
		break;
	case IPPROTO_ICMP:
	case IPPROTO_ICMPV6:
		if ((p->tuple.protocol == IPPROTO_ICMP) != p->v4 || bpf_skb_load_bytes(skb, p->l4, &byte, 1))
			return false;
		p->is |= is_error(p, byte) ? ERROR : byte == (p->v4 ? ECHO : ECHO6) ? ASKS : 0;
		return p->is & (ERROR | ASKS);
	default:
		return false;
	}
	if (bpf_skb_load_bytes(skb, p->l4, &ports, sizeof(ports)))
		return false;
	p->tuple.src.port = ports.src;
	p->tuple.dst.port = ports.dst;
	return true;
}

// ports_of lets the first fragment tell the others its ports. One that comes before the first has none, and is
// left to the stack.
static __always_inline bool ports_of(struct packet *p)
{
	struct fragment_key key = {
		.src = p->tuple.src.addr, .dst = p->tuple.dst.addr,
		.id = p->fragment, .protocol = p->tuple.protocol,
	};

	if (p->is & FIRST) {
		struct ports ports = {p->tuple.src.port, p->tuple.dst.port};

		bpf_map_update_elem(&fragments, &key, &ports, BPF_ANY);
		return true;
	}
	struct ports *known = bpf_map_lookup_elem(&fragments, &key);

	if (!known)
		return false;
	p->tuple.src.port = known->src;
	p->tuple.dst.port = known->dst;
	return true;
}

// parse reads the packet whose header begins at p->ip. p is zero but for this and v4. It is a function of its own,
// as some others are, because a chain of them may use 512 bytes of stack.
static __noinline int parse(struct __sk_buff *skb, struct packet *p)
{
	if (!p)
		return false;
	if (p->v4 ? !parse4(skb, p) : !parse6(skb, p))
		return false;
	if (!(p->is & LATER) && !parse_l4(skb, p))
		return false;
	if (p->is & (ERROR | ASKS))
		return !(p->is & FIRST);
	return !(p->is & (FIRST | LATER)) || ports_of(p);
}

static __always_inline bool peek4(const struct iphdr *ip, const void *end, struct tuple *t)
{
	if ((const void *)(ip + 1) > end || ip->version != 4 || ip->ihl != 5 ||
	    ip->frag_off & bpf_htons(IP_MORE_FRAGMENTS | IP_FRAGMENT_OFFSET))
		return false;
	t->src.addr = mapped(ip->saddr);
	t->dst.addr = mapped(ip->daddr);
	t->protocol = ip->protocol;
	return true;
}

static __always_inline bool peek6(const struct ipv6hdr *ip, const void *end, struct tuple *t)
{
	if ((const void *)(ip + 1) > end || ip->version != 6)
		return false;
	__builtin_memcpy(&t->src.addr, &ip->saddr, sizeof(struct addr));
	__builtin_memcpy(&t->dst.addr, &ip->daddr, sizeof(struct addr));
	t->protocol = ip->nexthdr;
	return !disguised(t);
}

static __always_inline bool glance4(const struct iphdr *ip, const void *end, struct packet *p)
{
	if (!peek4(ip, end, &p->tuple))
		return false;
	p->l4 = p->ip + sizeof(*ip);
	p->end = p->ip + bpf_ntohs(ip->tot_len);
	return true;
}

static __always_inline bool glance6(const struct ipv6hdr *ip, const void *end, struct packet *p)
{
	if (!peek6(ip, end, &p->tuple))
		return false;
	p->l4 = p->ip + sizeof(*ip);
	p->end = p->l4 + bpf_ntohs(ip->payload_len);
	return true;
}

// peek_ports reads what follows the header of IP, and what that says of the packet.
static __always_inline bool peek_ports(const void *l4, const void *end, struct tuple *t, __u8 *is)
{
	const struct tcphdr *tcp = l4;

	if (t->protocol == IPPROTO_TCP && (const void *)(tcp + 1) <= end)
		*is = meaning(tcp);
	else if (t->protocol == IPPROTO_UDP && l4 + sizeof(struct udphdr) <= end)
		*is = BEGINS;
	else
		return false;
	t->src.port = tcp->source;
	t->dst.port = tcp->dest;
	return true;
}

// glance reads a packet in place. If it cannot, what it has read counts for nothing.
static __always_inline bool glance(struct __sk_buff *skb, struct packet *p)
{
	const void *end = (void *)(long)skb->data_end, *ip = (void *)(long)skb->data + link_header;

	if (p->v4 ? !glance4(ip, end, p) : !glance6(ip, end, p))
		return false;
	const struct tcphdr *tcp = ip + (p->v4 ? sizeof(struct iphdr) : sizeof(struct ipv6hdr));

	p->plain = peek_ports(tcp, end, &p->tuple, &p->is);
	if (p->plain && p->tuple.protocol == IPPROTO_TCP && (const void *)(tcp + 1) <= end)
		number(p, tcp);
	return p->plain;
}

// goes_on says of a segment that begins nothing.
static __always_inline bool goes_on(const struct tcphdr *tcp, const void *end)
{
	return (const void *)(tcp + 1) <= end && !(meaning(tcp) & BEGINS);
}

// Whether a packet may begin a flow. It is MAYBE where that is not sure.
enum begins {
	MAYBE,
	GOES_ON,   // no: it is a segment of TCP that goes on
	ELSEWHERE, // no: no row is about where it goes; what says itself for which service it is has options
};

static __always_inline enum begins begins4(const struct iphdr *ip, const void *end)
{
	if ((const void *)(ip + 1) > end || ip->ihl != 5)
		return MAYBE;
	if (ip->protocol == IPPROTO_TCP && !(ip->frag_off & bpf_htons(IP_FRAGMENT_OFFSET)) &&
	    goes_on((const void *)(ip + 1), end))
		return GOES_ON;
	struct addr to = mapped(ip->daddr);

	return is_about(rows_in_force(), &to) ? MAYBE : ELSEWHERE;
}

static __always_inline enum begins begins6(const struct ipv6hdr *ip, const void *end)
{
	if ((const void *)(ip + 1) > end || (ip->nexthdr != IPPROTO_TCP && ip->nexthdr != IPPROTO_UDP))
		return MAYBE;
	if (ip->nexthdr == IPPROTO_TCP && goes_on((const void *)(ip + 1), end))
		return GOES_ON;
	struct addr to;

	__builtin_memcpy(&to, &ip->daddr, sizeof(to));
	return is_about(rows_in_force(), &to) ? MAYBE : ELSEWHERE;
}

static __always_inline enum begins begins(struct __sk_buff *skb)
{
	const void *end = (void *)(long)skb->data_end, *ip = (void *)(long)skb->data + link_header;

	if (skb->protocol == bpf_htons(ETH_P_IP))
		return begins4(ip, end);
	return skb->protocol == bpf_htons(ETH_P_IPV6) ? begins6(ip, end) : MAYBE;
}

// load reads a packet that passes a hook.
static __always_inline bool load(struct __sk_buff *skb, struct packet *p)
{
	p->ip = link_header;
	p->segments = skb->gso_segs;
	if (skb->protocol == bpf_htons(ETH_P_IP))
		p->v4 = true;
	else if (skb->protocol != bpf_htons(ETH_P_IPV6))
		return false;
	return glance(skb, p) || parse(skb, p);
}

// sums are the checksums that depend on the addresses and ports of a packet.
struct sums {
	__u32 at;	 // where it is; 0: none
	__u64 addresses; // flags for a change of addresses; NONE: it does not depend on them
	__u64 ports;	 // flags for a change of ports
	bool crc;	 // that of SCTP, which depends on the ports
};

#define NONE (~0ULL)

static __always_inline struct sums sums_of(const struct packet *p)
{
	__u64 mangled = p->tuple.protocol == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0;
	struct sums s = {.addresses = BPF_F_PSEUDO_HDR | mangled, .ports = mangled};

	if (p->is & LATER)
		return s;
	s.crc = p->tuple.protocol == IPPROTO_SCTP;
	if (p->tuple.protocol == IPPROTO_TCP)
		s.at = p->l4 + offsetof(struct tcphdr, check);
	else if (p->tuple.protocol == IPPROTO_UDP)
		s.at = p->l4 + offsetof(struct udphdr, check);
	else if (p->tuple.protocol == IPPROTO_ICMPV6)
		s.at = p->l4 + ICMP_CHECKSUM;
	return s;
}

// inside are those of a packet that an ICMP error quotes. Its own are left: what is quoted is cut off, so that nobody
// can check them. That of the error covers it, in IPv4 without effect of the addresses, which the checksum of the
// header that is quoted makes up for.
static __always_inline struct sums inside(const struct packet *error)
{
	if (error->v4)
		return (struct sums){.at = error->l4 + ICMP_CHECKSUM, .addresses = NONE};
	return (struct sums){.at = error->l4 + ICMP_CHECKSUM};
}

static __always_inline bool replace6(struct __sk_buff *skb, const struct sums *s, const struct addr *from,
				     const struct addr *to)
{
	__s64 diff = bpf_csum_diff((__be32 *)from, sizeof(*from), (__be32 *)to, sizeof(*to), 0);

	if (diff < 0)
		return false;
	return !bpf_l4_csum_replace(skb, s->at, 0, diff, s->addresses | CSUM_IPV6) ||
	       !bpf_l4_csum_replace(skb, s->at, 0, diff, s->addresses);
}

// set_addr writes an address, the source or else the destination.
static __always_inline bool set_addr(struct __sk_buff *skb, const struct packet *p, const struct sums *s, bool src,
				     const struct addr *to)
{
	const struct addr *from = src ? &p->tuple.src.addr : &p->tuple.dst.addr;

	if (same_addr(from, to))
		return true;
	if (!p->v4) {
		__u32 at = p->ip + (src ? offsetof(struct ipv6hdr, saddr) : offsetof(struct ipv6hdr, daddr));

		return !bpf_skb_store_bytes(skb, at, to, sizeof(*to), 0) &&
		       (!s->at || s->addresses == NONE || replace6(skb, s, from, to));
	}
	__be32 old = from->word[3], new = to->word[3];
	__u32 at = p->ip + (src ? offsetof(struct iphdr, saddr) : offsetof(struct iphdr, daddr));

	if (bpf_skb_store_bytes(skb, at, &new, sizeof(new), 0) ||
	    bpf_l3_csum_replace(skb, p->ip + offsetof(struct iphdr, check), old, new, sizeof(new)))
		return false;
	return !s->at || s->addresses == NONE ||
	       !bpf_l4_csum_replace(skb, s->at, old, new, s->addresses | sizeof(new));
}

static __always_inline bool set_port(struct __sk_buff *skb, const struct packet *p, const struct sums *s, bool src,
				     __be16 to)
{
	__be16 from = src ? p->tuple.src.port : p->tuple.dst.port;

	if (from == to || p->is & LATER)
		return true;
	return !bpf_skb_store_bytes(skb, p->l4 + (src ? 0 : 2), &to, sizeof(to), 0) &&
	       (!s->at || !bpf_l4_csum_replace(skb, s->at, from, to, s->ports | sizeof(to)));
}

#define CRC_BITS 16 // of a number of bytes
#define CRC_DIGITS 8

// What a digit at some place of a CRC becomes when 2^i bytes follow. Set when the programs are loaded.
const volatile __u32 crc_shifts[CRC_BITS][CRC_DIGITS][16];

// crc_shift is what a difference becomes when 2^i bytes follow.
__noinline __u32 crc_shift(__u32 difference, __u32 i)
{
	__u32 sum = 0;

	for (int j = 0; j < CRC_DIGITS; j++)
		sum ^= crc_shifts[i % CRC_BITS][j][difference >> 4 * j & 15];
	return sum;
}

// crc_of is by how much the CRC of so many bytes differs if the first four of them do. Such a sum is linear: the rest
// of the packet does not matter, only that there is one, which is a multiplication by x^8 for each byte. That is looked
// up, for loops that compute it took the verifier half of its time.
__noinline __u32 crc_of(__u32 difference, __u32 bytes)
{
	for (int i = 0; i < CRC_BITS; i++)
		if (bytes >> i & 1)
			difference = crc_shift(difference, i);
	return difference;
}

// set_crc makes up for new ports of SCTP. A checksum of 0 is one that a device or the kernel will fill in. What only
// begins here, a fragment, has no length that is known.
static __always_inline bool set_crc(struct __sk_buff *skb, const struct packet *p, __be16 src, __be16 dst)
{
	__u32 difference = (p->tuple.src.port ^ src) | (__u32)(p->tuple.dst.port ^ dst) << 16;
	__u32 crc, at = p->l4 + 8;

	if (!difference)
		return true;
	if (p->is & FIRST || bpf_skb_load_bytes(skb, at, &crc, sizeof(crc)))
		return false;
	if (!crc)
		return true;
	crc ^= crc_of(difference, p->end - p->l4);
	return !bpf_skb_store_bytes(skb, at, &crc, sizeof(crc), 0);
}

// rewrite changes from where to where a packet goes. It is false if the packet is spoilt.
static __noinline int rewrite(struct __sk_buff *skb, const struct packet *p, const struct sums *s,
			      const struct endpoint *src, const struct endpoint *dst)
{
	return set_addr(skb, p, s, true, &src->addr) && set_addr(skb, p, s, false, &dst->addr) &&
	       set_port(skb, p, s, true, src->port) && set_port(skb, p, s, false, dst->port) &&
	       (!s->crc || set_crc(skb, p, src->port, dst->port));
}

// sum_in is by how much a sum differs for another address.
static __always_inline __u64 sum_in(const struct addr *from, const struct addr *to, bool v4)
{
	__u64 sum = (__u32)~from->word[3] + (__u64)to->word[3];

	if (v4)
		return sum;
	for (int i = 0; i < 3; i++)
		sum += (__u32)~from->word[i] + (__u64)to->word[i];
	return sum;
}

// What a header has from its checksum to the ports behind it.
struct middle4 {
	__u16 check;
	__be32 src;
	__be32 dst;
	struct ports ports;
} __attribute__((packed));

struct middle6 {
	struct addr src;
	struct addr dst;
	struct ports ports;
};

static __always_inline bool place4(struct __sk_buff *skb, const struct packet *p, const struct endpoint *src,
				   const struct endpoint *dst, __u64 sum)
{
	const struct iphdr *ip = (void *)(long)skb->data + link_header;

	if ((const void *)(ip + 1) > (void *)(long)skb->data_end)
		return false;
	struct middle4 m = {
		.check = ~fold((__u16)~ip->check + sum),
		.src = src->addr.word[3], .dst = dst->addr.word[3], .ports = {src->port, dst->port},
	};

	return !bpf_skb_store_bytes(skb, p->ip + offsetof(struct iphdr, check), &m, sizeof(m), 0);
}

static __always_inline bool place6(struct __sk_buff *skb, const struct packet *p, const struct endpoint *src,
				   const struct endpoint *dst)
{
	struct middle6 m = {.src = src->addr, .dst = dst->addr, .ports = {src->port, dst->port}};

	return !bpf_skb_store_bytes(skb, p->ip + offsetof(struct ipv6hdr, saddr), &m, sizeof(m), 0);
}

// write_plain is rewrite for what was read in place. It writes by helpers: a program that writes in place has the kernel
// see at its begin, for each packet, whether that may be written to, whatever becomes of it.
static __noinline int write_plain(struct __sk_buff *skb, const struct packet *p, const struct endpoint *src,
				  const struct endpoint *dst)
{
	if (!p || !src || !dst)
		return false;
	__u64 addresses = sum_in(&p->tuple.src.addr, &src->addr, p->v4) +
			  sum_in(&p->tuple.dst.addr, &dst->addr, p->v4);
	__u32 from = p->tuple.src.port + p->tuple.dst.port, to = src->port + dst->port;
	__u64 mangled = p->tuple.protocol == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0;
	__u32 at = p->l4 + (mangled ? offsetof(struct udphdr, check) : offsetof(struct tcphdr, check));

	if (p->v4 ? !place4(skb, p, src, dst, addresses) : !place6(skb, p, src, dst))
		return false;
	addresses = (addresses >> 32) + (__u32)addresses;
	addresses = (addresses >> 32) + (__u32)addresses;
	if ((p->v4 || bpf_l4_csum_replace(skb, at, 0, addresses, BPF_F_PSEUDO_HDR | mangled | CSUM_IPV6)) &&
	    bpf_l4_csum_replace(skb, at, 0, addresses, BPF_F_PSEUDO_HDR | mangled))
		return false;
	return from == to || !bpf_l4_csum_replace(skb, at, from, to, mangled | sizeof(to));
}
