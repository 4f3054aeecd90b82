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
// client' is the client, with another port if its source is hidden, or if the backend knows that one already from another
// Service.
//
// The flow has all that the other three say. They are made with BPF_NOEXIST, which is what makes a port belong to one
// flow only, and made again now and then, should somebody have removed them.
//
// Whoever sends a packet makes a flow. So there are only so many that are not held (see asking), and a new one ends the
// oldest of these. A flow is held as soon as it lasts, if its owner has its share left, and then ends for nobody else.
#pragma once

#include "outcomes.h"
#include "packet.h"
#include "traffic.h"

// Times are in 2^20 ns, about a millisecond. What is longer ago than 49 days is not known.
enum ticks { TICKS = 954 /* per second */ };

static __always_inline __u32 ticks(void)
{
	return bpf_ktime_get_ns() >> 20;
}

enum state {
	BACK = 1 << 0,	      // from backend to client
	ANSWERED = 1 << 1,    // the backend has sent something
	CLIENT_ENDS = 1 << 2, // no more comes from there
	BACKEND_ENDS = 1 << 3,
	BROKEN = 1 << 4, // by a reset, it seems: only the ends know for sure whether it is a valid one
	LASTING = 1 << 5, // a client has gone on after an answer, and has shown that it got that
	DIRECT = 1 << 6,  // the backend's node answers; see dsr.h
	TOLD = 1 << 7,	  // this one does, for another one

	ENDING = CLIENT_ENDS | BACKEND_ENDS | BROKEN,
} __attribute__((packed));

enum held {
	PLACES = 7,	 // that its owner has for it: the flow and its ways back
	BY_LOAD = 1 << 4, // the flow only: its pool takes the less loaded backend
	LOADS = 1 << 5,	 // likewise: it counts as load of its backend
	FAILED = 1 << 6, // the flow only: the agent was told that it is not answered
	ASKED = 1 << 7, // the flow only: its client has begun anew, and the backend has not answered
} __attribute__((packed));

struct translation {
	struct endpoint src;
	struct endpoint dst;
	enum ticks last; // when it was used
	__u32 bytes; // that passed since they were last added to the traffic
	__u64 pool;  // its name; the way back to the client: terms, and in the lower half what it has to say, see proof_of
	__u16 packets;
	__u16 near;  // how far the sender is, see near_by; 0: not known
	__be16 port; // of the node, that stands for the client; 0: none; the flow only
	enum state state;
	enum held held;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__type(key, struct tuple);
	__type(value, struct translation);
} translations SEC(".maps");

// Flows that are not held, in the order in which they began: a ring for each processor, as no two may be at the same
// place.
struct asking {
	struct tuple flow;
	__u32 owner;
	__u32 next; // in the first place of a ring: where the next flow goes
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct asking);
} asking SEC(".maps");

const volatile __u32 rings;
const volatile __u32 ring; // places in each

// How many flows at the begin of a ring may stay that are in use: those that are open, though their owner has no share left,
// and those of others than the one that begins. So who begins many ends its own.
#define SPARED 3

// Whether there may be flows. Programs set both words before they make one, and see to them once more after it: the
// processor may show others a write later than it reads. Who finds the table empty (sweep.go) clears busy, in one step
// with finding that nothing was laid since it began to look.
struct activity {
	__u32 busy;
	__u32 laid;
};

struct activity live SEC(".data.activity");

// What a flow is at, and for how many seconds it may be silent at that. The seconds are set when the programs are
// loaded, because others look for flows that are over, too.
enum phase {
	UDP_ASKING,
	UDP_LASTING,
	BEGINNING, // not answered yet, or the client has not shown that it got that
	TCP_OPEN,
	SCTP_OPEN,
	HALF_CLOSED,
	RESET, // by either side, or by somebody who says so and sees neither
	OVER,
	PHASES,
};
GO(phase);

const volatile __u32 patience[PHASES];

// The addresses of the node that clients are hidden behind, by the device that packets leave by, and there by the next
// hop, or in IPv6 by where they go; device 0: any other. Where node ports may be, for direct answers, is there by the
// numbers -1, -2 …
enum answering { OWN_ADDRS = 8 };
GO(answering);

struct node_addr_key {
	__u32 bits;
	__u32 device;
	__u32 v4;
	struct addr to;
};

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1);
	__type(key, struct node_addr_key);
	__type(value, struct addr);
} node_addrs SEC(".maps");

// taken are ports of the node, by what backends send there, of connections whose clients connection tracking hides.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 16);
	__type(key, struct tuple);
	__type(value, __u8);
} taken SEC(".maps");

const volatile __u16 ports_first; // ports of the node that stand for clients
const volatile __u16 ports_count;

#define TRIES 32 // to find a port that is free

static __always_inline enum phase phase(__u8 protocol, __u8 state)
{
	if (protocol == IPPROTO_UDP)
		return state & LASTING ? UDP_LASTING : UDP_ASKING;
	if ((state & BROKEN && !(state & ANSWERED)) || (state & CLIENT_ENDS && state & BACKEND_ENDS))
		return OVER;
	if (state & BROKEN)
		return RESET;
	if (!(state & LASTING))
		return BEGINNING;
	if (state & ENDING)
		return HALF_CLOSED;
	return protocol == IPPROTO_SCTP ? SCTP_OPEN : TCP_OPEN;
}

// is_closed says of a flow whether a client may begin another one in its place. A reset may be forged: one is believed of
// 16,384 whose numbers are spaced evenly (near_by). So a reset closes no flow that lasts. Its backend decides: if the
// connection is over there, it accepts what begins (accepted). Who answers directly is not seen to end.
static __always_inline bool is_closed(__u8 state)
{
	return (state & CLIENT_ENDS && state & (BACKEND_ENDS | DIRECT)) || (state & BROKEN && !(state & LASTING));
}

static __always_inline __u32 patience_at(enum phase at)
{
	return at < PHASES ? patience[at] * TICKS : 0;
}

// Not on the stack, of which a chain of functions has 512 bytes.
static const __u32 only = 0; // key of the only element of a table

// Which keys the table has, in a byte for each by a hash: most packets are of no flow, and to find that out in the table
// takes ten times as long. Every key in the table is noted in the list that is in force. So programs note a key in both
// lists before they put it into the table, and once more after it, as the one may have been emptied meanwhile. Who reads
// the whole table (sweep.go) empties the list that is not in force, notes in it what is there, and puts it in force.
// Bytes, as programs of Linux 5.10 set no bits that others set bits beside.
#define NOTES (1 << 18)

struct notes {
	__u32 in_force; // which list is: 1 or 2; 0: none is complete
	__u32 pass;	// a random number for the agent's last one through the table
	__u32 table;	// the kernel's number for the map that the pass is through
	__u32 pad;
	__u8 lists[2][NOTES];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct notes);
} noted SEC(".maps");

// note_of is where a key is noted: what flowfilter.go says, too.
static __always_inline __u32 note_of(const struct tuple *key)
{
	const __u32 *a = key->src.addr.word, *b = key->dst.addr.word;
	__u64 h = ((__u64)a[2] << 32 | a[3]) * 0x9e3779b97f4a7c15ULL;

	h += ((__u64)b[2] << 32 | b[3]) * 0xc2b2ae3d27d4eb4fULL;
	h += ((__u64)a[0] << 32 | a[1]) * 0x165667b19e3779f9ULL;
	h += ((__u64)b[0] << 32 | b[1]) * 0xd6e8feb86659fd93ULL;
	h += ((__u64)key->src.port << 32 | (__u64)key->dst.port << 16 | (__u64)key->hook << 8 | key->protocol) *
	     0xff51afd7ed558ccdULL;
	h ^= h >> 32;
	h *= 0x9fb21c651e98df25ULL;
	return h >> 46;
}

static __always_inline void note(struct notes *n, __u32 at)
{
	if (!n)
		return;
	volatile __u8 *one = &n->lists[0][at], *other = &n->lists[1][at];

	if (!*one)
		*one = 1;
	if (!*other)
		*other = 1;
}

// is_noted says whether the table may have a key.
static __always_inline bool is_noted(const struct tuple *key)
{
	struct notes *n = bpf_map_lookup_elem(&noted, &only);
	__u32 list = n ? *(volatile __u32 *)&n->in_force - 1 : 2;

	return !n || list > 1 || *(volatile __u8 *)&n->lists[list & 1][note_of(key) % NOTES];
}

// insert puts a translation into the table.
static __noinline int insert(const struct tuple *key, const struct translation *t, __u64 flags)
{
	if (!key || !t)
		return -1;
	struct notes *n = bpf_map_lookup_elem(&noted, &only);
	__u32 at = note_of(key) % NOTES;

	note(n, at);
	int failed = bpf_map_update_elem(&translations, key, t, flags);

	note(n, at);
	return failed;
}

static __always_inline bool has_flows(void)
{
	return *(volatile __u32 *)&live.busy;
}

static __always_inline void have_flows(void)
{
	volatile struct activity *a = &live;

	// Not written again and again: processors would wait for each other.
	if (!a->laid)
		a->laid = 1;
	if (!a->busy)
		a->busy = 1;
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

// is_strange says of a packet that the table has nothing about it, and has no way back that it would have to yield.
static __always_inline bool is_strange(struct __sk_buff *skb, enum hook hook)
{
	const void *end = (void *)(long)skb->data_end, *ip = (void *)(long)skb->data + link_header;
	struct tuple key = {.hook = hook}, back;
	bool v4 = skb->protocol == bpf_htons(ETH_P_IP);
	__u8 is = 0;

	if (v4 ? !peek4(ip, end, &key) : skb->protocol != bpf_htons(ETH_P_IPV6) || !peek6(ip, end, &key))
		return false;
	ip += v4 ? sizeof(struct iphdr) : sizeof(struct ipv6hdr);
	if (!peek_ports(ip, end, &key, &is) || is_noted(&key))
		return false;
	if (hook == INGRESS || !(is & BEGINS))
		return true;
	reverse(&back, &key.src, &key.dst, key.protocol, INGRESS);
	return !is_noted(&back);
}

// count adds a packet to what passed. Should another processor do so at the same moment, one of the two is not counted.
static __always_inline void count(struct translation *t, const struct packet *p)
{
	t->bytes += p->end - p->ip;
	t->packets += p->segments ? p->segments : 1;
}

// quiet is for how long a translation was not used: 0 if another processor has used it after what is now here.
static __always_inline __u32 quiet(const struct translation *t, __u32 now)
{
	__s32 time = now - t->last;

	return time > 0 ? time : 0;
}

// is_due says whether what is known of a flow is to be brought up to date: once in a second, and when it begins or ends.
static __always_inline bool is_due(const struct translation *t, const struct packet *p, __u32 now)
{
	return quiet(t, now) >= TICKS || p->is & (ACCEPTS | FINAL | RESETS) || t->bytes >> 31 || t->packets >> 15;
}

// A packet may be forged by whoever knows addresses and ports, but hardly by who does not see what the ends tell each
// other. So a flow is open when its client has said what only an answer tells (proof_of), and ends by what is where its
// sender is (near_by), as connection tracking has it:
//
//	TCP   a client acknowledges SYN and ACK; FIN and RST are in the sender's sequence, as far as 64 kB
//	SCTP  a client has the tag of INIT ACK; ABORT and SHUTDOWN COMPLETE have the tag that the other side named

// near_by is where in a sequence something is, in units of 64 kB. It is never 0.
static __always_inline __u16 near_by(__u32 seq)
{
	return seq >> 16 ? seq >> 16 : 1;
}

// is_near says whether something is where the sender is. That may be two units farther where 0 was left out.
static __always_inline bool is_near(const struct translation *t, __u32 seq)
{
	return t->near && (__u16)(near_by(seq) - t->near + 1) <= 3;
}

// moves_on notes how far a sender is, never back.
static __always_inline void moves_on(struct translation *t, __u32 next)
{
	__u16 now = near_by(next);

	if (!t->near || (__s16)(now - t->near) > 0)
		t->near = now;
}

// follow notes that of a segment.
static __always_inline void follow(struct translation *t, const struct packet *p)
{
	if (p->tuple.protocol == IPPROTO_TCP && !(p->is & RESETS) && (!t->near || is_near(t, p->seq)))
		moves_on(t, p->next);
}

// back_of is a flow's way back to its client.
static __always_inline struct translation *back_of(const struct translation *flow, __u8 protocol)
{
	struct tuple key;

	reverse(&key, &flow->src, &flow->dst, protocol, EGRESS);
	return bpf_map_lookup_elem(&translations, &key);
}

// proof_of is what the client of a way back has to say: the number that follows that of SYN and ACK, or the tag of INIT
// ACK. 0: anything.
static __always_inline __u32 proof_of(const struct translation *back)
{
	return back->pool;
}

// hold_port lets others know that a flow which is held has its port: who looks for one need not ask.
static __noinline int hold_port(struct translation *flow, __u8 protocol)
{
	struct tuple key;

	if (!flow)
		return 0;
	reverse(&key, &flow->dst, &flow->src, protocol, EGRESS);
	struct translation *forth = bpf_map_lookup_elem(&translations, &key);

	if (!forth)
		return 0;
	reverse(&key, &forth->src, &flow->dst, protocol, INGRESS);
	struct translation *way = bpf_map_lookup_elem(&translations, &key);

	if (way)
		way->held = flow->held & PLACES;
	return 0;
}

// hold has a flow stay until it is over, if its owner has places left. If two processors do so at the same moment, more
// are lent than there are: who reads the whole table (sweep.go) puts that right.
static __always_inline void hold(struct translation *flow, struct translation *back, __u8 protocol)
{
	__u8 places = flow->port ? 4 : flow->state & (DIRECT | TOLD) ? 3 : 2;

	if (!(back->held & PLACES)) {
		if (!lend(OF_FLOWS, owner_of(back->pool), places))
			return;
		back->held |= places;
	}
	flow->held |= back->held & PLACES;
	if (flow->port)
		hold_port(flow, protocol);
}

// believed says whether a packet ends its flow, if it says so. Its side is `own`; that of SCTP needs the other one.
static __always_inline bool believed(const struct packet *p, const struct translation *own,
				     const struct translation *other)
{
	if (p->tuple.protocol == IPPROTO_SCTP) // who has lost an association has no other tag than its own
		return near_by(p->ack) == own->near || (other && near_by(p->ack) == other->near);
	return is_near(own, p->seq);
}

// book adds what has passed to the traffic of a flow's backend, once in a second, so that processors share it.
static __noinline int book(struct translation *t, const struct translation *flow, enum direction way)
{
	if (!t || !flow)
		return 0;
	struct traffic_key key = {.pool = flow->pool, .backend = flow->dst};

	add_traffic(&key, way, t->packets, t->bytes);
	t->bytes = 0;
	t->packets = 0;
	return 0;
}

static __always_inline const struct addr *node_addr(__u32 device, bool v4, const struct addr *to)
{
	struct node_addr_key key = {
		.bits = 8 * (sizeof(key) - sizeof(key.bits)), .device = device, .v4 = v4, .to = *to,
	};

	return bpf_map_lookup_elem(&node_addrs, &key);
}

// way_out is the device by which the kernel sends the packets of a flow to where that is sent to, and, if it differs, the
// next hop; 0: it does not say.
static __noinline __u32 way_out(struct __sk_buff *skb, const struct translation *flow, __u8 protocol, struct addr *to)
{
	if (!flow || !to)
		return 0;
	bool v4 = is_ipv4(&flow->dst.addr);
	struct bpf_fib_lookup r = {
		.ifindex = skb->ifindex, .l4_protocol = protocol, .sport = flow->src.port, .dport = flow->dst.port,
	};

	if (v4) {
		r.family = AF_INET;
		r.ipv4_src = flow->src.addr.word[3];
		r.ipv4_dst = flow->dst.addr.word[3];
	} else {
		r.family = AF_INET6;
		__builtin_memcpy(r.ipv6_src, &flow->src.addr, sizeof(struct addr));
		__builtin_memcpy(r.ipv6_dst, &flow->dst.addr, sizeof(struct addr));
	}
	switch (bpf_fib_lookup(skb, &r, sizeof(r), 0)) {
	case BPF_FIB_LKUP_RET_SUCCESS:
	case BPF_FIB_LKUP_RET_NO_NEIGH:
	case BPF_FIB_LKUP_RET_FRAG_NEEDED:
		if (v4 && r.family == AF_INET) // and not by a next hop of IPv6
			to->word[3] = r.ipv4_dst;
		return r.ifindex;
	}
	return 0;
}

// hide_behind finds the address and port of the node that stand for the client of a flow: those that it has already,
// `forth` says so, or else the port that it asks for, and the address for the way by which its packets leave, as
// MASQUERADE has it. A connection keeps its address whatever becomes of routes.
static __always_inline bool hide_behind(struct __sk_buff *skb, const struct translation *flow,
					const struct translation *forth, __u8 protocol, struct endpoint *out)
{
	if (forth) {
		*out = forth->src;
		return true;
	}
	struct addr to = flow->dst.addr;
	bool v4 = is_ipv4(&to);
	const struct addr *a = node_addr(way_out(skb, flow, protocol, &to), v4, &to);

	if (!a)
		a = node_addr(0, v4, &flow->dst.addr);
	if (!a)
		return false;
	*out = (struct endpoint){.addr = *a, .port = flow->port};
	return true;
}

static __always_inline bool is_ours(__be16 port)
{
	return (__u16)(bpf_ntohs(port) - ports_first) < ports_count;
}

__noinline __be16 any_port(void)
{
	return bpf_htons(ports_first + bpf_get_prandom_u32() % (ports_count ? ports_count : 1));
}

// over says whether a packet begins a new flow in place of one that is known.
static __always_inline bool over(const struct packet *p, const struct translation *flow, __u32 now)
{
	if (quiet(flow, now) > patience_at(phase(p->tuple.protocol, flow->state)))
		return true;
	return p->is & BEGINS && p->tuple.protocol != IPPROTO_UDP && is_closed(flow->state);
}

// drop_back removes a way back if it leads from src to the client. Another flow may have laid its own there since.
static __always_inline bool drop_back(const struct tuple *key, const struct endpoint *src, const struct endpoint *client,
				      const struct translation *flow)
{
	struct translation *t = bpf_map_lookup_elem(&translations, key);

	if (!t || !same(&t->src, src) || !same(&t->dst, client))
		return false;
	__u32 owner = owner_of(t->pool), places = key->hook == EGRESS ? t->held & PLACES : 0;

	if (t->packets)
		book(t, flow, TO_CLIENT);
	if (bpf_map_delete_elem(&translations, key))
		return false;
	if (places)
		give_back(OF_FLOWS, owner, places);
	return true;
}

// unlay removes what follows from a flow.
static __always_inline void unlay(const struct tuple *from, const struct translation *flow)
{
	struct tuple key;

	reverse(&key, &flow->src, &flow->dst, from->protocol, EGRESS);
	bool own = drop_back(&key, &from->dst, &from->src, flow);

	if (flow->state & (DIRECT | TOLD) && own) {
		reverse(&key, &flow->dst, &flow->src, from->protocol, flow->state & TOLD ? INGRESS : EGRESS);
		bpf_map_delete_elem(&translations, &key);
	}
	if (flow->port && own) {
		reverse(&key, &flow->dst, &flow->src, from->protocol, EGRESS);
		struct translation *forth = bpf_map_lookup_elem(&translations, &key);

		if (forth) {
			reverse(&key, &forth->src, &flow->dst, from->protocol, INGRESS);
			drop_back(&key, &flow->dst, &flow->src, flow);
			reverse(&key, &flow->dst, &flow->src, from->protocol, EGRESS);
			bpf_map_delete_elem(&translations, &key);
		}
	}
}

// weigh has an open flow count as load of its backend, and no other.
static __noinline int weigh(struct translation *flow)
{
	if (!flow)
		return 0;
	bool ended = flow->state & BROKEN || (flow->state & CLIENT_ENDS && flow->state & (BACKEND_ENDS | DIRECT));

	if (ended != !!(flow->held & LOADS))
		return 0;
	flow->held ^= LOADS;
	return bear(flow->pool, &flow->dst, BY_PACKETS, ended ? -1 : 1);
}

// forget removes a flow and what follows from it.
static __noinline int forget(const struct tuple *from, struct translation *flow)
{
	if (!from || !flow)
		return 0;
	if (flow->packets)
		book(flow, flow, TO_BACKEND);
	if (flow->held & LOADS)
		bear(flow->pool, &flow->dst, BY_PACKETS, -1);
	unlay(from, flow);
	return bpf_map_delete_elem(&translations, from);
}

// free_port removes the flow that has a way back from a backend, former->src, to a port of the node, former->dst, if it
// gives way: to a packet that begins another one if it is over, to who asks for any port (p is 0) if it is not held. It
// is former then.
static __noinline int free_port(__u8 protocol, const struct packet *p, struct translation *former)
{
	if (!former)
		return false;
	struct tuple key;

	reverse(&key, &former->dst, &former->src, protocol, INGRESS);
	struct translation *way = bpf_map_lookup_elem(&translations, &key);

	if (!way || !(way->state & BACK) || way->state & TOLD)
		return false;
	reverse(&key, &way->dst, &former->src, protocol, EGRESS);
	struct translation *back = bpf_map_lookup_elem(&translations, &key);

	if (back) {
		reverse(&key, &back->src, &back->dst, protocol, INGRESS);
		struct translation *flow = bpf_map_lookup_elem(&translations, &key);

		if (flow && same(&flow->src, &way->dst)) {
			if (p ? !over(p, flow, ticks()) : flow->held & PLACES)
				return false;
			*former = *flow;
			return !forget(&key, former);
		}
	}
	reverse(&key, &former->dst, &former->src, protocol, INGRESS);
	return !bpf_map_delete_elem(&translations, &key);
}

// claim makes a way back, to the port it names or another one that is free. Whoever has one has it alone, until the
// flow ends. If it finds none, the key has one of a flow that is not held, if it has come upon one. A client that is its
// own backend does not get that one's port: its way there and its way back would have one key.
static __noinline int claim(struct tuple *key, const struct translation *becomes)
{
	if (!key || !becomes)
		return -1;
	__be16 not_held = 0;

	for (int i = 0; i < TRIES; i++) {
		if ((key->hook == EGRESS ? !same(&key->src, &key->dst) : !bpf_map_lookup_elem(&taken, key)) &&
		    !insert(key, becomes, BPF_NOEXIST))
			return 0;
		struct translation *known = bpf_map_lookup_elem(&translations, key);

		if (!i && known && same(&known->src, &becomes->src) && same(&known->dst, &becomes->dst))
			return 0;
		if (known && !(known->held & PLACES))
			not_held = key->dst.port;
		key->dst.port = any_port();
	}
	key->dst.port = not_held;
	return -1;
}

// lay_forth hides the client on the way to its backend, t says as whom. Another packet of the flow may do so at the same
// moment: then the way that is there first counts, and the way back that this one has made for itself goes. It goes, too,
// if the table takes no more: unlay finds it by the way there only.
static __always_inline bool lay_forth(struct tuple *key, struct translation *flow, struct translation *t, __u64 flags)
{
	if (!insert(key, t, flags))
		return true;
	struct translation *first = bpf_map_lookup_elem(&translations, key);

	if (first)
		flow->port = first->src.port;
	if (!first || !same(&first->src, &t->src)) {
		reverse(key, &t->src, &flow->dst, key->protocol, INGRESS);
		bpf_map_delete_elem(&translations, key);
	}
	return !!first;
}

// lay makes the three translations of a flow that follow from it. flow->port asks for a port if it is not 0, and gets
// the one that is free. A flow that is answered directly has one beside that to its client: on the first node, where the
// packets of it leave, and on the backend's, where they arrive. Its source is the service. The way back to the client has
// the flow's terms. Where no port of the node is free, former has the way back for which one is needed.
static __noinline int lay(struct __sk_buff *skb, const struct tuple *from, struct translation *flow, __u64 terms,
			  struct translation *former)
{
	if (!from || !flow || !former)
		return false;
	struct translation t = {
		.src = from->dst, .dst = from->src, .last = flow->last, .pool = terms, .state = BACK,
	};
	struct tuple key;

	reverse(&key, &flow->src, &flow->dst, from->protocol, EGRESS);
	if (claim(&key, &t))
		return false;
	flow->src.port = key.dst.port;
	if (flow->state & (DIRECT | TOLD) && flow->src.port == from->src.port) {
		t.near = flow->near;
		t.src = from->dst;
		t.dst = flow->dst;
		t.state = flow->state & TOLD ? TOLD | BACK : DIRECT;
		key.src = flow->src;
		key.dst = flow->dst;
		key.hook = flow->state & TOLD ? INGRESS : EGRESS;
		return !insert(&key, &t, BPF_ANY);
	}
	if (flow->state & TOLD)
		return false;
	if (flow->state & DIRECT) { // nobody would give the client its port back
		flow->state &= ~DIRECT;
		flow->port = any_port();
	}
	if (!flow->port)
		return true;
	reverse(&key, &flow->dst, &flow->src, from->protocol, EGRESS);
	struct translation *known = bpf_map_lookup_elem(&translations, &key);
	__u64 flags = known ? BPF_ANY : BPF_NOEXIST;

	if (known && known->state & DIRECT) // left of another flow
		known = 0;
	if (!hide_behind(skb, flow, known, from->protocol, &t.dst))
		return false;
	reverse(&key, &t.dst, &flow->dst, from->protocol, INGRESS);
	t.src = flow->dst;
	t.dst = flow->src;
	if (claim(&key, &t)) {
		former->src = key.src;
		former->dst = key.dst;
		return false;
	}
	flow->port = key.dst.port;
	t.src = key.dst;
	t.dst = flow->dst;
	t.state = 0;
	reverse(&key, &flow->dst, &flow->src, from->protocol, EGRESS);
	return lay_forth(&key, flow, &t, flags);
}

// queue has a flow that begins take the place of the one that began first, which ends if it is not held.
static __noinline int queue(const struct tuple *from, __u32 owner, struct translation *former)
{
	__u32 first = bpf_get_smp_processor_id();

	first = (first < rings ? first : first % rings) * ring;
	struct asking *begin = bpf_map_lookup_elem(&asking, &first);
	__u32 now = ticks();

	if (!from || !former || !begin)
		return 0;
#pragma unroll // Linux before 6.4 takes no loop whose begin the compiler moves
	for (int i = 0; i <= SPARED; i++) {
		__u32 at = first + begin->next;
		struct asking *place = bpf_map_lookup_elem(&asking, &at);

		begin->next = begin->next + 1 < ring ? begin->next + 1 : 0;
		if (!place)
			return 0;
		struct translation *known = bpf_map_lookup_elem(&translations, &place->flow);

		if (known && !(known->state & BACK) && !(known->held & PLACES)) {
			if (i < SPARED && quiet(known, now) < 10 * TICKS &&
			    (known->state & LASTING || place->owner != owner))
				continue;
			*former = *known;
			forget(&place->flow, former);
		}
		place->flow = *from;
		place->owner = owner;
		break;
	}
	return 0;
}

// give_way has a flow become what another processor has made of it first. It is false if none has: no port was free, or
// the table took no more.
static __noinline int give_way(const struct tuple *from, struct translation *flow)
{
	if (!from || !flow)
		return false;
	struct translation *first = bpf_map_lookup_elem(&translations, from);

	if (!first || !same(&first->src, &flow->src) || !same(&first->dst, &flow->dst))
		unlay(from, flow);
	if (first)
		*flow = *first;
	return !!first;
}

// A connection that is broken sends nothing, but what was on its way already. What is sent all the time is noted once in
// a second (is_due), so this may not be longer.
#define BREAKING TICKS

// progress is what a packet does to the state of its flow, of which it is one side's. Of one that is not believed the ends
// of the flow themselves see what to make of it.
static __always_inline __u8 progress(const struct packet *p, __u8 state, __u8 ends, __u32 idle, bool believed)
{
	if (p->is & RESETS)
		return believed ? state | BROKEN : state;
	if (state & BROKEN && idle >= BREAKING)
		state &= ~BROKEN;
	return p->is & FINAL && believed ? state | ends : state;
}

// fails tells the agent, once, of a flow whose backend has not answered. Another node's flow it does not care about.
static __always_inline void fails(struct translation *flow, const struct endpoint *to, const struct addr *client,
				  __u8 protocol, enum result result)
{
	if (flow->state & (ANSWERED | LASTING | TOLD) || flow->held & FAILED)
		return;
	flow->held |= FAILED;
	report(to, &flow->dst, client, protocol, result);
}

// accepted is for what answers a client's first packet. While the flow is open that is believed only if its client has
// begun anew, from the same port: then that connection takes the place of the one before.
static __always_inline void accepted(struct translation *back, struct translation *flow, const struct packet *p)
{
	if (flow->state & LASTING) {
		if (!(flow->held & ASKED))
			return;
		flow->state &= ~ENDING;
		flow->near = near_by(p->ack);
	}
	back->near = near_by(p->next);
	back->pool = (back->pool & ~0xffffffffULL) | p->next;
}

// answered lets the flow know that its backend has sent something. What two processors write here at the same time
// may be lost: a flow then is forgotten later.
static __always_inline void answered(struct translation *back, const struct packet *p, __u32 now)
{
	struct tuple key;

	reverse(&key, &back->src, &back->dst, p->tuple.protocol, INGRESS);
	struct translation *flow = bpf_map_lookup_elem(&translations, &key);

	if (!flow)
		return;
	book(back, flow, TO_CLIENT);
	if (p->is & ACCEPTS)
		accepted(back, flow, p);
	// Who refuses a connection has sent nothing before, but knows where the client is.
	bool ends = back->near ? believed(p, back, flow) : is_near(flow, p->ack);

	if (p->is & RESETS && ends)
		fails(flow, &back->src, &back->dst.addr, p->tuple.protocol, IS_REFUSED);
	else if (!(p->is & RESETS) && !(flow->state & (ANSWERED | TOLD)) && wants_answers())
		report(&back->src, &flow->dst, &back->dst.addr, p->tuple.protocol, IS_ANSWERED);
	if (p->tuple.protocol == IPPROTO_UDP && !(flow->state & ANSWERED))
		attach(&flow->src.addr, flow->pool, &flow->dst, back->pool);

	flow->state = progress(p, flow->state, BACKEND_ENDS, quiet(flow, now), ends) | (p->is & RESETS ? 0 : ANSWERED);
	if (p->tuple.protocol == IPPROTO_TCP && !(p->is & RESETS) && is_near(back, p->seq))
		moves_on(flow, p->ack);
	if (flow->held & ASKED)
		flow->held &= ~ASKED;
	if (flow->held & BY_LOAD)
		weigh(flow);
	flow->last = now;
	if (flow->packets)
		book(flow, flow, TO_BACKEND);
}

// confirm notes that a packet goes back to a client. The first answer counts, and that the flow is not idle; not every
// one.
static __always_inline void confirm(struct translation *back, const struct packet *p)
{
	__u32 now = ticks();

	if (!(back->state & BACK))
		return;
	count(back, p);
	follow(back, p);
	if (back->state & ANSWERED && !is_due(back, p, now))
		return;
	back->state |= ANSWERED;
	back->last = now;
	answered(back, p, now);
}

// client_ends says whether a client's packet ends its flow, if it says so.
static __noinline int client_ends(const struct packet *p, const struct translation *flow)
{
	if (!p || !flow)
		return false;
	return believed(p, flow, p->tuple.protocol == IPPROTO_SCTP ? back_of(flow, IPPROTO_SCTP) : 0);
}

// prove notes that a client goes on after an answer, if what it says shows that it has got that. From then on the flow is
// held, if it can be.
static __noinline int prove(const struct packet *p, struct translation *flow)
{
	if (!p || !flow)
		return 0;
	struct translation *back = back_of(flow, p->tuple.protocol);

	if (!back)
		return 0;
	if (!(flow->state & LASTING)) {
		if (proof_of(back) && proof_of(back) != p->ack)
			return 0;
		attach(&flow->src.addr, flow->pool, &flow->dst, back->pool);
	}
	flow->state |= LASTING;
	hold(flow, back, p->tuple.protocol);
	return 0;
}

// shows says of a client's packet whether it may prove that it has an answer.
static __always_inline bool shows(const struct packet *p, __u8 state)
{
	return (state & (ANSWERED | LASTING)) == ANSWERED && !(p->is & (BEGINS | RESETS)) &&
	       p->tuple.protocol != IPPROTO_UDP;
}

// insists says of an open flow whose client begins anew whether it has done so before, and the backend has not answered:
// one that has the connection would have.
static __always_inline bool insists(const struct translation *flow, __u32 now)
{
	return flow->held & ASKED && quiet(flow, now) >= TICKS / 2;
}

// ask_anew is for a packet that begins a connection while its flow is open, of which it may be no part. The next packet
// of the backend tells whether there is one.
static __noinline int ask_anew(const struct packet *p, struct translation *flow)
{
	if (!p || !flow)
		return 0;
	struct translation *back = back_of(flow, p->tuple.protocol);

	if (back)
		back->state &= ~ANSWERED;
	flow->held |= ASKED;
	flow->last = ticks();
	return 0;
}
