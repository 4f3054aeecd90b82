// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
// Copyright The Fairlead Authors

// Services for packets whose sender has no socket here: what comes from outside, virtual machines, SCTP.
//
//	device ─► ingress: where it goes ─► the stack routes, filters, forwards ─► egress: where it comes from ─► device
//
// The two hooks divide the work as NAT in the stack does, and for its reasons. A packet from the node's own address
// that arrives is a martian to IPv4, so a source may be hidden only after routing. In return the kernel does all that
// it knows better: routes, tunnels, neighbours, the time to live, the MTU and who may forward what. Filters see clients
// by their own address, on both ways.
//
// Flows have a table of their own (flows.h), since the programs load on Linux 5.10 without kernel BTF, where conntrack
// cannot be called. bpf_skb_ct_alloc and its siblings need Linux 6.0, BTF and the module. With them a packet's flow is
// found in twice the time, and one that begins takes as much, or a fifth less (`./dev bench Tracking`); and while conntrack
// is in use it looks at all other packets, too. It would buy collisions with the node's own connections solved, and
// conntrack(8).
//
// Neither hook keeps what it does not know from others: they see the packet next.
#include "answer.h"
#include "dsr.h"

struct source_key {
	__u32 bits;
	struct frontend_key frontend;
	__u32 internal; // whether the client is the node or a pod of it
	struct addr addr;
};

// Who may use frontends that are LIMITED.
SETS(sources,
     __uint(type, BPF_MAP_TYPE_LPM_TRIE);
     __uint(map_flags, BPF_F_NO_PREALLOC);
     __uint(max_entries, 1);
     __type(key, struct source_key);
     __type(value, __u32););

// The source addresses of pods.
SETS(pods,
     __uint(type, BPF_MAP_TYPE_LPM_TRIE);
     __uint(map_flags, BPF_F_NO_PREALLOC);
     __uint(max_entries, 1);
     __type(key, struct guard_key);
     __type(value, __u32););

// Where a device leads.
enum device {
	ANYWHERE,
	TO_PODS, // of this node, and nowhere else
};

// What a packet meets.
struct meeting {
	struct target target;
	__u32 rows; // which say so
	bool pod;   // it comes from one
	__u64 netns; // of its socket, if that has met the service before, and is counted: the client's cookie; 0: it has not
	__u64 terms; // of the flow that begins: see terms_of
};

// What a program works on. What is on the stack the verifier follows, and would look once more at all that comes after for
// each kind of packet; of what is in a map it assumes nothing, so that all ways through a program come together again.
// A processor works on one packet at a time, as bottom halves are off, but with PREEMPT_RT. There each program takes a
// place of its own.
struct work {
	struct packet packet;
	struct packet inner; // that an ICMP error quotes
	struct meeting meeting;
	__u32 taken; // how many have it, or try to get it
	struct translation flow;
	struct translation former; // in whose place it comes
};

#define PREEMPTED 8 // programs on a processor, at most

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, PREEMPTED);
	__type(key, __u32);
	__type(value, struct work);
} works SEC(".maps");

const volatile bool preempt_rt;

// take finds a place that no program has which was preempted. It is 0 if there is none.
static __always_inline struct work *take(void)
{
	for (__u32 i = 0; i < PREEMPTED; i++) {
		__u32 place = i;
		struct work *w = bpf_map_lookup_elem(&works, &place);

		if (!w)
			return 0;
		__sync_fetch_and_add(&w->taken, 1);
		if (*(volatile __u32 *)&w->taken == 1)
			return w;
		__sync_fetch_and_add(&w->taken, -1);
		asm volatile("" : "+r"(i)); // keeps it in a register, or else Linux 5.10 sees an endless loop
	}
	return 0;
}

static __always_inline struct work *begin_work(void)
{
	struct work *w = preempt_rt ? take() : bpf_map_lookup_elem(&works, &only);

	if (w)
		w->packet = (struct packet){};
	return w;
}

static __always_inline int end_work(struct work *w, int verdict)
{
	if (preempt_rt)
		__sync_fetch_and_add(&w->taken, -1);
	return verdict;
}

static __always_inline bool allowed(const struct packet *p, const struct meeting *m)
{
	struct source_key key = {
		.bits = 8 * (sizeof(key) - sizeof(key.bits)),
		.frontend = {.addr = p->tuple.dst.addr, .port = p->tuple.dst.port, .protocol = p->tuple.protocol},
		.internal = m->pod,
		.addr = p->tuple.src.addr,
	};

	return find_in(&sources, m->rows, &key);
}

// meet says what becomes of a flow that a packet may begin.
static __noinline int meet(const struct packet *p, struct meeting *m, enum device device)
{
	if (!p || !m)
		return 0;
	struct guard_key key = {.bits = 128, .addr = p->tuple.src.addr};
	bool two = false;

	m->rows = rows_in_force();
	m->pod = device == TO_PODS;
	m->netns = 0;
	decide(m->rows, &p->tuple.dst, p->tuple.protocol, m->pod, &m->target, &two);
	if (m->target.verdict == PASS && !two) // as for most: who it is from does not matter
		return 0;
	if (!m->pod && find_in(&pods, m->rows, &key)) {
		m->pod = true;
		if (two)
			decide(m->rows, &p->tuple.dst, p->tuple.protocol, true, &m->target, 0);
	}
	if (m->target.flags & LIMITED && !allowed(p, m))
		m->target.verdict = DROP;
	return 0;
}

// hides says whether the backend sees the node in place of the client. What goes to the node itself is never hidden:
// it does not pass the egress hook of any device. A client that is its own backend always is: its answer to itself
// would not come here. (The rows ask for that on this node only. Elsewhere no other way would work.) Nor would those of a
// backend behind the client's own device, as where both are at one bridge.
static __always_inline bool hides(struct __sk_buff *skb, const struct packet *p, const struct meeting *m,
				  const struct translation *flow)
{
	const struct addr *here = node_addr(0, p->v4, &flow->dst.addr);
	struct addr next;

	if (here && same_addr(&flow->dst.addr, here))
		return false;
	if (same_addr(&flow->dst.addr, &p->tuple.src.addr) || m->target.flags & SNAT_ALWAYS ||
	    (m->target.flags & SNAT_OFFCLUSTER && !m->pod))
		return true;
	return way_out(skb, flow, p->tuple.protocol, &next) == skb->ifindex;
}

// begin chooses a backend for a flow.
static __noinline int begin(struct __sk_buff *skb, const struct packet *p, struct meeting *m, struct translation *flow)
{
	if (!p || !m || !flow)
		return REJECT;
	__u32 number = m->target.pool;
	struct pool *pool = pool_at(m->rows, number);

	*flow = (struct translation){.src = p->tuple.src, .last = ticks(), .near = near_by(p->next)};
	struct addr from = m->netns ? client(m->netns) : p->tuple.src.addr; // as connect() has it for the pod's sockets

	if (!pool || !choose(m->rows, number, pool, &from, &flow->dst, !m->netns))
		return REJECT;
	if (m->netns) { // other sockets of the pod may ask the backend itself from the same port
		flow->src.port = any_port();
		if (pool->affinity)
			attach(&from, pool->name, &flow->dst, terms_of(pool));
	}
	flow->pool = pool->name;
	flow->held = pool->by_load ? BY_LOAD | LOADS : 0;
	m->terms = terms_of(pool);
	count(flow, p);
	if (!hides(skb, p, m, flow))
		return FORWARD;
	if (answers_directly(p, m->target.flags, m->pod, &flow->dst.addr)) {
		flow->state = DIRECT;
		return FORWARD;
	}
	// Until it is hidden, too, the client has a port that sockets do not get: with its own, its packets to the
	// backend itself would be taken for those of this flow.
	flow->port = flow->src.port = is_ours(p->tuple.src.port) ? p->tuple.src.port : any_port();
	return FORWARD;
}

// left says whether the backend of a flow has left, which begins.
static __noinline int left(const struct translation *flow, const struct meeting *m)
{
	__u32 number = m->target.pool;
	struct pool *pool = pool_at(m->rows, number);

	return m->target.verdict != FORWARD || !pool || pool->name != flow->pool ||
	       membership(m->rows, &flow->dst, number) == STRANGER;
}

// book_back adds what has come back for a flow.
static __noinline int book_back(const struct packet *p, const struct translation *flow)
{
	if (!p || !flow)
		return 0;
	struct translation *back = back_of(flow, p->tuple.protocol);

	if (back && back->packets)
		book(back, flow, TO_CLIENT);
	return 0;
}

// use notes that a flow is used.
static __always_inline void use(const struct packet *p, struct translation *flow, __u32 now)
{
	bool udp = p->tuple.protocol == IPPROTO_UDP;

	if (p->is & BEGINS && quiet(flow, now) >= TICKS / 2)
		fails(flow, &p->tuple.dst, &p->tuple.src.addr, p->tuple.protocol, IS_UNANSWERED);
	count(flow, p);
	if (udp || !(p->is & BEGINS))
		follow(flow, p);
	else if (flow->state & LASTING)
		ask_anew(p, flow);
	else
		flow->near = near_by(p->next);
	bool ends = p->is & (FINAL | RESETS) && client_ends(p, flow);

	flow->state = progress(p, flow->state, CLIENT_ENDS, quiet(flow, now), ends);
	if ((flow->state & (DIRECT | ANSWERED)) == DIRECT && !(p->is & (BEGINS | RESETS))) { // the client has an answer
		flow->state |= ANSWERED;
		if (wants_answers())
			report(&p->tuple.dst, &flow->dst, &p->tuple.src.addr, p->tuple.protocol, IS_ANSWERED);
	}
	if (flow->held & BY_LOAD)
		weigh(flow);
	if (shows(p, flow->state))
		prove(p, flow);
	if (!is_due(flow, p, now))
		return;
	bool lasts = flow->state & LASTING ||
		     (udp && flow->state & (ANSWERED | DIRECT) && quiet(flow, now) >= TICKS);

	if (lasts && !(flow->held & PLACES))
		prove(p, flow);
	flow->last = now;
	book(flow, flow, TO_BACKEND);
	if (p->is & RESETS) // no answer follows that would do it
		book_back(p, flow);
}

// rests says whether a flow was silent for so long that what follows from it is to be made again.
static __always_inline bool rests(const struct translation *flow, __u32 now)
{
	return quiet(flow, now) > 10 * TICKS;
}

// ends says whether a packet is no longer one of the flow that is known.
static __always_inline bool ends(const struct packet *p, const struct translation *flow, struct meeting *m,
				 enum device device, __u32 now)
{
	if (over(p, flow, now))
		return true;
	if (!(p->is & BEGINS))
		return false;
	if (flow->state & BROKEN && insists(flow, now)) // the backend would have answered, whatever it knows of the connection
		return true;
	meet(p, m, device);
	return left(flow, m) && (p->tuple.protocol == IPPROTO_UDP || !(flow->state & LASTING) || flow->state & BROKEN ||
				 insists(flow, now));
}

// find is what becomes of a packet of a flow that is known and needs nothing else. Nothing is noted yet.
static __always_inline struct translation *find(const struct packet *p, struct meeting *m, enum device device)
{
	struct translation *t = has_flows() ? bpf_map_lookup_elem(&translations, &p->tuple) : 0;
	__u32 now = ticks();

	if (!t || t->state & BACK)
		return t;
	return rests(t, now) || ends(p, t, m, device, now) ? 0 : t;
}

// unreached tells the agent if an ICMP error says that the backend of a client which is not answered yet cannot be
// reached.
static __noinline int unreached(struct __sk_buff *skb, const struct packet *p, const struct translation *back,
				__u8 protocol)
{
	struct {
		__u8 type, code;
	} icmp;
	struct tuple key;

	if (!p || !back || bpf_skb_load_bytes(skb, p->l4, &icmp, sizeof(icmp)) ||
	    (p->v4 ? icmp.type != DEST_UNREACH || icmp.code == TOO_LONG : icmp.type != DEST_UNREACH6))
		return 0;
	reverse(&key, &back->src, &back->dst, protocol, INGRESS);
	struct translation *flow = bpf_map_lookup_elem(&translations, &key);

	if (flow)
		fails(flow, &back->src, &back->dst.addr, protocol, IS_REFUSED);
	return 0;
}

// quoted translates an ICMP error: the packet that it quotes went the other way.
static __noinline int quoted(struct __sk_buff *skb, const struct packet *p, struct packet *in, enum hook hook)
{
	if (!p || !in)
		return TC_ACT_UNSPEC;
	struct tuple key;

	*in = (struct packet){.ip = p->l4 + ICMP_HEADER, .v4 = p->v4};
	if (!parse(skb, in) || in->is & (ERROR | ASKS))
		return TC_ACT_UNSPEC;
	reverse(&key, &in->tuple.src, &in->tuple.dst, in->tuple.protocol, hook);
	struct translation *t = bpf_map_lookup_elem(&translations, &key);

	if (!t || (hook == EGRESS && t->state & DIRECT) || (t->state & BACK && t->state & TOLD))
		return TC_ACT_UNSPEC;
	if (hook == EGRESS && (t->state & (BACK | ANSWERED)) == BACK)
		unreached(skb, p, t, in->tuple.protocol);
	struct endpoint src = t->src, dst = t->dst;
	struct sums outer = sums_of(p), inner = inside(p);

	if (!rewrite(skb, in, &inner, &dst, &src))
		return TC_ACT_SHOT;
	// Whoever sent it keeps its address, unless it is the far end itself.
	if (!same_addr(&p->tuple.src.addr, &key.src.addr))
		src.addr = p->tuple.src.addr;
	if (!same_addr(&p->tuple.dst.addr, &key.dst.addr))
		dst.addr = p->tuple.dst.addr;
	return set_addr(skb, p, &outer, true, &src.addr) && set_addr(skb, p, &outer, false, &dst.addr) ?
		       TC_ACT_UNSPEC : TC_ACT_SHOT;
}

static __always_inline int forward(struct __sk_buff *skb, const struct packet *p, const struct translation *t)
{
	struct sums s = sums_of(p);

	if (p->plain)
		return write_plain(skb, p, &t->src, &t->dst) ? TC_ACT_UNSPEC : TC_ACT_SHOT;
	return rewrite(skb, p, &s, &t->src, &t->dst) ? TC_ACT_UNSPEC : TC_ACT_SHOT;
}

// established finds what becomes of a packet of a flow that is known: the flow of work. It is false if there is none.
static __always_inline bool established(struct __sk_buff *skb, struct work *w, enum device device)
{
	const struct packet *p = &w->packet;
	struct translation *t = has_flows() ? bpf_map_lookup_elem(&translations, &p->tuple) : 0;
	__u32 now = ticks();

	if (!t)
		return false;
	w->flow = *t;
	if (t->state & BACK) {
		if (t->state & TOLD)
			heard(p, t);
		return true;
	}
	if (ends(p, t, &w->meeting, device, now)) {
		forget(&p->tuple, &w->flow);
		return false;
	}
	bool again = rests(t, now);

	use(p, t, now);
	if (again)
		lay(skb, &p->tuple, &w->flow, 0, &w->former);
	return true;
}

// keep puts a flow into the table, or finds the one that another processor has put there meanwhile: resolvers send two
// datagrams at once, which are to reach the same backend, and not to be sent again after five seconds. It fails if no
// port is free, or no room, and leaves nothing then: the client will send its packet again.
static __always_inline bool keep(struct __sk_buff *skb, struct work *w)
{
	const struct tuple *from = &w->packet.tuple;

	have_flows();
	w->former.dst.port = 0;
	bool laid = lay(skb, from, &w->flow, w->meeting.terms, &w->former);
	__be16 port = w->former.dst.port;

	// Flows without an answer would keep all ports.
	if (!laid && port && free_port(from->protocol, 0, &w->former)) {
		w->flow.port = port;
		laid = lay(skb, from, &w->flow, w->meeting.terms, &w->former);
	}
	if (laid && !insert(from, &w->flow, BPF_NOEXIST)) {
		if (w->flow.held & LOADS)
			bear(w->flow.pool, &w->flow.dst, BY_PACKETS, 1);
		queue(from, owner_of(w->meeting.terms), &w->former);
	} else if (!give_way(from, &w->flow)) {
		return false;
	}
	have_flows();
	return true;
}

// What a packet says of the service that it is for.
enum told {
	STRANGE, // nothing, or nothing to be believed
	KNOWN,
	NEW,
};

// leads_to finds the pool that clients of a service outside are led to, if the backend is one of it. A node port of
// another node is no row of this one; the node port of that number here leads to the same backends. Not every address of
// this node need have it.
static __noinline struct pool *leads_to(struct packet *p, struct meeting *m, const struct endpoint *backend)
{
	if (!p || !m || !backend)
		return 0;
	meet(p, m, ANYWHERE);
	for (int i = 0; i <= OWN_ADDRS && m->target.verdict == PASS; i++) {
		const struct addr *here = node_addr(-i, p->v4, &p->tuple.dst.addr);

		if (!here)
			break;
		p->tuple.dst.addr = *here;
		meet(p, m, ANYWHERE);
	}
	__u32 number = m->target.pool;

	if (m->pod || m->target.verdict != FORWARD || !member(m->rows, backend, number))
		return 0;
	return pool_at(m->rows, number);
}

// learn finds the flow of a packet that another node has sent for a service: p is what the client has sent there, then.
// The flow is not kept yet, for its sake from a function whose stack leaves room.
static __noinline int learn(struct __sk_buff *skb, struct packet *p, struct meeting *m, struct translation *flow)
{
	if (!p || !m || !flow)
		return STRANGE;
	struct endpoint service, backend = p->tuple.dst;

	if (!says(skb, p, &service))
		return STRANGE;
	p->tuple.dst = service;
	struct pool *pool = leads_to(p, m, &backend);

	p->tuple.dst = pool ? service : backend;
	if (!pool)
		return STRANGE;
	struct translation *known = bpf_map_lookup_elem(&translations, &p->tuple);

	if (known && is_again(known, p, &backend))
		return KNOWN;
	if (known) {
		*flow = *known;
		forget(&p->tuple, flow);
	}
	m->terms = terms_of(pool);
	*flow = (struct translation){
		.src = p->tuple.src, .dst = backend, .last = ticks(), .pool = pool->name, .near = near_by(p->next),
		.state = TOLD,
	};
	return NEW;
}

const volatile __u32 places; // for connected sockets, see sock.c

// waiting is the place of a pod's socket whose first packet goes to a backend that its service has no more. The packet is
// sent again then: the backend has not answered. What comes from another machine has no socket.
static __noinline struct place *waiting(struct __sk_buff *skb)
{
	const void *end = (void *)(long)skb->data_end, *ip = (void *)(long)skb->data + link_header;
	__u64 cookie = bpf_get_socket_cookie(skb);
	__u32 rows = rows_in_force(), number = cookie & places;
	bool v4 = skb->protocol == bpf_htons(ETH_P_IP);
	struct place *at = bpf_map_lookup_elem(&sockets, &number);
	struct tuple key = {};
	struct target t;
	__u8 is = 0;

	if (!at || !cookie || at->cookie != cookie || at->protocol != IPPROTO_TCP ||
	    (v4 ? !peek4(ip, end, &key) : !peek6(ip, end, &key)))
		return 0;
	ip += v4 ? sizeof(struct iphdr) : sizeof(struct ipv6hdr);
	if (!peek_ports(ip, end, &key, &is) || !(is & BEGINS) || !same(&at->peer.backend, &key.dst))
		return 0;
	decide(rows, &at->peer.service, IPPROTO_TCP, true, &t, 0);
	return t.verdict == FORWARD && membership(rows, &key.dst, t.pool) == STRANGER ? at : 0;
}

// passes says of most packets that, if they are of no flow, they begin none.
static __always_inline bool passes(struct __sk_buff *skb)
{
	enum begins b = begins(skb);

	return b == GOES_ON || (b == ELSEWHERE && !waiting(skb));
}

// meet_again has the service of a socket that waits lead to another backend, which answers in the name of the former.
static __noinline int meet_again(struct __sk_buff *skb, struct packet *p, struct meeting *m, enum device device)
{
	struct place *at = waiting(skb);

	if (!p || !m || !at)
		return 0;
	struct endpoint backend = p->tuple.dst;

	at->moved = 1;
	p->tuple.dst = at->peer.service;
	meet(p, m, device);
	m->netns = at->netns;
	p->tuple.dst = backend;
	return 0;
}

// For others than this node, in linux/if_packet.h, which needs the C library.
#define PACKET_OTHERHOST 3

// serve_arrived is for packets that may be of a flow, or begin one.
static __always_inline int serve_arrived(struct __sk_buff *skb, struct work *w, enum device device)
{
	struct packet *p = &w->packet;
	struct meeting *m = &w->meeting;
	struct translation *t = &w->flow;

	if (!load(skb, p))
		return TC_ACT_UNSPEC;
	if (p->is & ERROR)
		return quoted(skb, p, &w->inner, INGRESS);
	p->tuple.hook = INGRESS;
	if (direct_mtu && device == ANYWHERE && p->is & BEGINS && !p->plain) {
		enum told told = learn(skb, p, m, t);

		if (told == NEW)
			keep(skb, w);
		if (told != STRANGE)
			return TC_ACT_UNSPEC;
	}
	if (!(p->is & ASKS) && established(skb, w, device)) {
		return (t->state & (TOLD | BACK)) == (TOLD | BACK) ? TC_ACT_UNSPEC : forward(skb, p, t);
	}
	if (!(p->is & (BEGINS | ASKS)))
		return TC_ACT_UNSPEC;
	meet(p, m, device);
	if (m->target.verdict == PASS)
		meet_again(skb, p, m, device);
	int verdict = m->target.verdict;

	if (verdict == REJECT || verdict == DROP)
		refused(&p->tuple.dst, p->tuple.protocol, &m->target);
	if (verdict == FORWARD)
		verdict = begin(skb, p, m, t);
	if (verdict == FORWARD && !keep(skb, w))
		verdict = DROP;
	switch (verdict) {
	case FORWARD:
		return forward(skb, p, t);
	case REJECT:
		return refuse(skb, p);
	case DROP:
		return TC_ACT_SHOT;
	}
	return TC_ACT_UNSPEC;
}

static __noinline int arrive(struct __sk_buff *skb, enum device device)
{
	// What is for another machine passes a bridge here, or is only overheard.
	if (skb->pkt_type == PACKET_OTHERHOST)
		return TC_ACT_UNSPEC;
	if (has_flows() && is_strange(skb, INGRESS) && passes(skb))
		return TC_ACT_UNSPEC;
	struct work *w = begin_work();

	return w ? end_work(w, serve_arrived(skb, w, device)) : TC_ACT_SHOT;
}

// The programs themselves are short, and need no registers to be saved: most packets they let go.

SEC("tc/ingress")
int from_anywhere(struct __sk_buff *skb)
{
	return !has_flows() && passes(skb) ? TC_ACT_UNSPEC : arrive(skb, ANYWHERE);
}

SEC("tc/ingress")
int from_pods(struct __sk_buff *skb)
{
	return !has_flows() && passes(skb) ? TC_ACT_UNSPEC : arrive(skb, TO_PODS);
}

// yield has a port of the node belong to a connection that begins, or a datagram, and is not the programs': of another
// plane, which hides clients itself, or of a socket. Answers would go to the client that had the port before. Only a flow
// that is over goes for it: the packet need not come from whom it names, and an open one has its port alone.
static __always_inline void yield(const struct packet *p, struct translation *former)
{
	former->src = p->tuple.dst;
	former->dst = p->tuple.src;
	free_port(p->tuple.protocol, p, former);
}

static __always_inline int serve_leaving(struct __sk_buff *skb, struct work *w)
{
	struct packet *p = &w->packet;

	if (!load(skb, p))
		return TC_ACT_UNSPEC;
	if (p->is & ERROR)
		return quoted(skb, p, &w->inner, EGRESS);
	if (p->is & ASKS)
		return TC_ACT_UNSPEC;
	p->tuple.hook = EGRESS;
	struct translation *t = bpf_map_lookup_elem(&translations, &p->tuple);

	// What has left a VLAN's device passes here again, as the programs have made it.
	if (!t && p->is & BEGINS && !skb->vlan_present)
		yield(p, &w->former);
	if (!t)
		return TC_ACT_UNSPEC;
	if (t->state & DIRECT) {
		if (!(p->is & BEGINS))
			return TC_ACT_UNSPEC;
		struct endpoint service = t->src;

		return tell(skb, p, &service) ? TC_ACT_UNSPEC : TC_ACT_SHOT;
	}
	confirm(t, p);
	return forward(skb, p, t);
}

static __noinline int depart(struct __sk_buff *skb)
{
	if (is_strange(skb, EGRESS))
		return TC_ACT_UNSPEC;
	struct work *w = begin_work();

	return w ? end_work(w, serve_leaving(skb, w)) : TC_ACT_SHOT;
}

SEC("tc/egress")
int leave(struct __sk_buff *skb)
{
	return has_flows() ? depart(skb) : TC_ACT_UNSPEC;
}

char _license[] SEC("license") = "Dual BSD/GPL";
