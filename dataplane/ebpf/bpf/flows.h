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
// flow only, and made again now and then, should the kernel have given their memory to others.
#pragma once

#include "packet.h"

// Times are in 2^20 ns, about a millisecond. What is longer ago than 49 days is not known.
#define TICKS 954 // per second

static __always_inline __u32 ticks(void)
{
	return bpf_ktime_get_ns() >> 20;
}

struct translation {
	struct endpoint src;
	struct endpoint dst;
	__u32 last;  // when it was used
	__u32 bytes; // that passed since they were last added to the traffic
	__u64 pool;  // its name
	__u32 packets;
	__be16 port; // of the node, that stands for the client; 0: none; the flow only
	__u8 state;  // the bits below
	__u8 pad;
};

enum {
	BACK = 1 << 0,	      // from backend to client
	ANSWERED = 1 << 1,    // the backend has sent something
	CLIENT_ENDS = 1 << 2, // no more comes from there
	BACKEND_ENDS = 1 << 3,
	BROKEN = 1 << 4, // by a reset, it seems: only the ends know whether it is a valid one
	LASTING = 1 << 5, // a client has gone on after an answer
	DIRECT = 1 << 6,  // the backend's node answers; see dsr.h
	TOLD = 1 << 7,	  // this one does, for another one

	ENDING = CLIENT_ENDS | BACKEND_ENDS | BROKEN,
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1);
	__type(key, struct tuple);
	__type(value, struct translation);
} translations SEC(".maps");

// Whether there may be flows. Programs set both words before they make one, and see to them once more after it: the
// processor may show others a write later than it reads. Who finds the table empty (sweep.go) clears busy, in one step
// with finding that nothing was laid since it began to look.
struct activity {
	__u32 busy;
	__u32 laid;
};

struct activity live SEC(".data.activity");

// What has passed between clients and a backend. It is added to once in a second for each flow, so that processors
// share it.
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

struct traffic {
	__u64 packets[DIRECTIONS];
	__u64 bytes[DIRECTIONS];
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1);
	__type(key, struct traffic_key);
	__type(value, struct traffic);
} traffic SEC(".maps");

// What a flow is at, and for how many seconds it may be silent at that. The seconds are set when the programs are
// loaded, because others look for flows that are over, too.
enum phase {
	UDP_ASKING,
	UDP_LASTING,
	BEGINNING, // not answered yet
	TCP_OPEN,
	SCTP_OPEN,
	HALF_CLOSED,
	RESET, // by either side, or by somebody who says so and sees neither
	OVER,
	PHASES,
};

const volatile __u32 patience[PHASES];

// The addresses of the node that clients are hidden behind, by the device that packets leave by, and there by the next
// hop, or in IPv6 by where they go; device 0: any other. Where node ports may be, for direct answers, is there by the
// numbers -1, -2 …
#define OWN_ADDRS 8

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
	if (state & ENDING)
		return HALF_CLOSED;
	if (!(state & ANSWERED))
		return BEGINNING;
	return protocol == IPPROTO_SCTP ? SCTP_OPEN : TCP_OPEN;
}

static __always_inline __u32 patience_at(enum phase at)
{
	return at < PHASES ? patience[at] * TICKS : 0;
}

// Not on the stack, of which a chain of functions has 512 bytes.
static const __u32 only = 0; // key of the only element of a table
static const struct traffic no_traffic;

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

// note_of is where a key is noted: what notes.go says, too.
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

static __always_inline void note(const struct tuple *key)
{
	struct notes *n = bpf_map_lookup_elem(&noted, &only);
	__u32 at = note_of(key) % NOTES;

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
	note(key);
	int failed = bpf_map_update_elem(&translations, key, t, flags);

	note(key);
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

// is_due says whether what is known of a flow is to be brought up to date: once in a second, and when it ends.
static __always_inline bool is_due(const struct translation *t, const struct packet *p, __u32 now)
{
	return quiet(t, now) >= TICKS || p->is & (FINAL | RESETS) || t->bytes >> 31;
}

// book adds what has passed to the backend's traffic.
static __noinline int book(struct translation *t, const struct endpoint *backend, enum direction way)
{
	if (!t || !backend || way >= DIRECTIONS)
		return 0;
	struct traffic_key key = {.pool = t->pool, .backend = *backend};
	struct traffic *sum = bpf_map_lookup_elem(&traffic, &key);
	__u64 bytes = t->bytes;
	__u32 packets = t->packets;

	t->bytes = 0;
	t->packets = 0;
	if (!sum) {
		bpf_map_update_elem(&traffic, &key, &no_traffic, BPF_NOEXIST);
		sum = bpf_map_lookup_elem(&traffic, &key);
	}
	if (!sum)
		return 0;
	__sync_fetch_and_add(&sum->packets[way], packets);
	__sync_fetch_and_add(&sum->bytes[way], bytes);
	return 0;
}

static __always_inline const struct addr *node_addr(__u32 device, bool v4, const struct addr *to)
{
	struct node_addr_key key = {
		.bits = 8 * (sizeof(key) - sizeof(key.bits)), .device = device, .v4 = v4, .to = *to,
	};

	return bpf_map_lookup_elem(&node_addrs, &key);
}

// on_way_out is the address for packets to where a flow is sent to, by the device and next hop that the kernel takes
// for them, if it says so.
static __noinline const struct addr *on_way_out(struct __sk_buff *skb, const struct translation *flow, __u8 protocol)
{
	if (!flow)
		return 0;
	struct addr to = flow->dst.addr;
	bool v4 = is_ipv4(&to);
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
			to.word[3] = r.ipv4_dst;
		return node_addr(r.ifindex, v4, &to);
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
	const struct addr *a = on_way_out(skb, flow, protocol);

	if (!a)
		a = node_addr(0, is_ipv4(&flow->dst.addr), &flow->dst.addr);
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

// claim makes a way back, to the port it names or another one that is free. Whoever has one has it alone, until the
// client uses its own port again, the table, which is full, forgets it, or somebody finds that the flow is over.
static __noinline int claim(struct tuple *key, const struct translation *becomes)
{
	if (!key || !becomes)
		return -1;
	struct translation *known = bpf_map_lookup_elem(&translations, key);

	if (known && same(&known->src, &becomes->src) && same(&known->dst, &becomes->dst))
		return 0;
	for (int i = 0; i < TRIES; i++) {
		if ((key->hook == EGRESS || !bpf_map_lookup_elem(&taken, key)) &&
		    !insert(key, becomes, BPF_NOEXIST))
			return 0;
		key->dst.port = any_port();
	}
	return -1;
}

// lay_forth hides the client on the way to its backend, t says as whom. Another packet of the flow may do so at the same
// moment: then the way that is there first counts, and the way back that this one has made for itself goes.
static __always_inline bool lay_forth(struct tuple *key, struct translation *flow, struct translation *t, __u64 flags)
{
	if (!insert(key, t, flags))
		return true;
	struct translation *first = bpf_map_lookup_elem(&translations, key);

	if (!first)
		return false;
	flow->port = first->src.port;
	if (!same(&first->src, &t->src)) {
		reverse(key, &t->src, &flow->dst, key->protocol, INGRESS);
		bpf_map_delete_elem(&translations, key);
	}
	return true;
}

// lay makes the three translations of a flow that follow from it. flow->port asks for a port if it is not 0, and gets
// the one that is free. A flow that is answered directly has one beside that to its client: on the first node, where the
// packets of it leave, and on the backend's, where they arrive. Its source is the service.
static __noinline int lay(struct __sk_buff *skb, const struct tuple *from, struct translation *flow)
{
	if (!from || !flow)
		return false;
	struct translation t = {
		.src = from->dst, .dst = from->src, .last = flow->last, .pool = flow->pool, .state = BACK,
	};
	struct tuple key;

	reverse(&key, &flow->src, &flow->dst, from->protocol, EGRESS);
	if (claim(&key, &t))
		return false;
	flow->src.port = key.dst.port;
	if (flow->state & (DIRECT | TOLD) && flow->src.port == from->src.port) {
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
	if (claim(&key, &t))
		return false;
	flow->port = key.dst.port;
	t.src = key.dst;
	t.dst = flow->dst;
	t.state = 0;
	reverse(&key, &flow->dst, &flow->src, from->protocol, EGRESS);
	return lay_forth(&key, flow, &t, flags);
}

// drop_back removes a way back that leads to a client, and not one that belongs to somebody else by now.
static __always_inline bool drop_back(const struct tuple *key, const struct endpoint *client)
{
	struct translation *t = bpf_map_lookup_elem(&translations, key);

	if (!t || !same(&t->dst, client))
		return false;
	if (t->packets)
		book(t, &key->src, TO_CLIENT);
	return !bpf_map_delete_elem(&translations, key);
}

// unlay removes what follows from a flow.
static __always_inline void unlay(const struct tuple *from, const struct translation *flow)
{
	struct tuple key;

	reverse(&key, &flow->src, &flow->dst, from->protocol, EGRESS);
	bool own = drop_back(&key, &from->src);

	if (flow->state & (DIRECT | TOLD) && own) {
		reverse(&key, &flow->dst, &flow->src, from->protocol, flow->state & TOLD ? INGRESS : EGRESS);
		bpf_map_delete_elem(&translations, &key);
	}
	if (flow->port && own) {
		reverse(&key, &flow->dst, &flow->src, from->protocol, EGRESS);
		struct translation *forth = bpf_map_lookup_elem(&translations, &key);

		if (forth) {
			reverse(&key, &forth->src, &flow->dst, from->protocol, INGRESS);
			drop_back(&key, &flow->src);
			reverse(&key, &flow->dst, &flow->src, from->protocol, EGRESS);
			bpf_map_delete_elem(&translations, &key);
		}
	}
}

// forget removes a flow and what follows from it.
static __noinline int forget(const struct tuple *from, struct translation *flow)
{
	if (!from || !flow)
		return 0;
	if (flow->packets)
		book(flow, &flow->dst, TO_BACKEND);
	unlay(from, flow);
	return bpf_map_delete_elem(&translations, from);
}

// give_way has a flow become what another processor has made of it first. It is false if nobody has: the table took no
// more.
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

// A connection that is broken sends nothing, but what was on its way already.
#define BREAKING (2 * TICKS)

// progress is what a packet does to the state of its flow, of which it is one side's.
static __always_inline __u8 progress(const struct packet *p, __u8 state, __u8 ends, __u32 idle)
{
	if (p->is & RESETS)
		return state | BROKEN;
	if (state & BROKEN && idle > BREAKING)
		state &= ~BROKEN;
	return p->is & FINAL ? state | ends : state;
}

// answered lets the flow know that its backend has sent something. What two processors write here at the same time
// may be lost: a flow then is forgotten later.
static __always_inline void answered(const struct translation *back, const struct packet *p, __u32 now)
{
	struct tuple key;

	reverse(&key, &back->src, &back->dst, p->tuple.protocol, INGRESS);
	struct translation *flow = bpf_map_lookup_elem(&translations, &key);

	if (!flow)
		return;
	flow->state = progress(p, flow->state, BACKEND_ENDS, quiet(flow, now)) | (p->is & RESETS ? 0 : ANSWERED);
	flow->last = now;
	if (flow->packets)
		book(flow, &p->tuple.src, TO_BACKEND);
}

// confirm notes that a packet goes back to a client. The first answer counts, and that the flow is not idle; not every
// one.
static __always_inline void confirm(struct translation *back, const struct packet *p)
{
	__u32 now = ticks();

	if (!(back->state & BACK))
		return;
	count(back, p);
	if (back->state & ANSWERED && !is_due(back, p, now))
		return;
	back->state |= ANSWERED;
	back->last = now;
	book(back, &p->tuple.src, TO_CLIENT);
	answered(back, p, now);
}
