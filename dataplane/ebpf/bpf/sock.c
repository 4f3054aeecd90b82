// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
// Copyright The Fairlead Authors

// Services for everything that has a socket: the address is translated once, in the system call.
//
//   connect     ─► service to backend; the socket remembers both
//   sendmsg     ─► the same for each datagram of a socket that is not connected: one service in its place, several as flows
//   recvmsg     ─► backend to service: programs compare where an answer comes from
//   getpeername ─► backend to service
//   close       ─► the socket's place is free
//   packets     ─► are counted for the backend, if the agent wants that
//
// The last programs here learn the outcomes of TCP connections from the kernel's tracing.
#include "balance.h"
#include "outcomes.h"
#include "traffic.h"

#define AF_INET 2
#define ETIMEDOUT 110
#define ECONNREFUSED 111

// As long as this without a datagram, a socket that is not connected keeps its backend: what conntrack does.
#define FLOW_IDLE (120 * SECOND)

// In place of a protocol: a place is of a socket that is not connected.
#define DATAGRAMS 0

// Set when the programs are loaded. The verifier leaves out what does not apply.
const volatile __u64 node_netns;       // cookie of the node's network namespace; 0: the first one
const volatile bool alone;	       // nobody serves packets: what is not forwarded must be refused here
const volatile __u32 places;	       // how many there are for connected sockets, less one: a power of two
const volatile bool only_node;	       // sockets of others pass
const volatile bool node_alone;	       // nobody serves the node's own packets: likewise
const volatile bool counts_traffic;    // programs count what sockets send and get, too
const volatile bool has_set_retval;    // and with it another error than EPERM: Linux 5.18

static __always_inline void load4(const struct bpf_sock_addr *ctx, struct endpoint *e)
{
	*e = (struct endpoint){
		.addr.word = {0, 0, bpf_htonl(0xffff), ctx->user_ip4},
		.port = ctx->user_port,
	};
}

static __always_inline void store4(struct bpf_sock_addr *ctx, const struct endpoint *e)
{
	ctx->user_ip4 = e->addr.word[3];
	ctx->user_port = e->port;
}

static __always_inline void load6(const struct bpf_sock_addr *ctx, struct endpoint *e)
{
	*e = (struct endpoint){
		.addr.word = {ctx->user_ip6[0], ctx->user_ip6[1], ctx->user_ip6[2], ctx->user_ip6[3]},
		.port = ctx->user_port,
	};
}

static __always_inline void store6(struct bpf_sock_addr *ctx, const struct endpoint *e)
{
	ctx->user_ip6[0] = e->addr.word[0];
	ctx->user_ip6[1] = e->addr.word[1];
	ctx->user_ip6[2] = e->addr.word[2];
	ctx->user_ip6[3] = e->addr.word[3];
	ctx->user_port = e->port;
}

enum { REFUSED = 0, ALLOWED = 1 };

static __always_inline int refuse(enum verdict verdict)
{
	if (has_set_retval)
		bpf_set_retval(verdict == DROP ? -ETIMEDOUT : -ECONNREFUSED);
	return REFUSED;
}

static __always_inline bool is_node(__u64 netns)
{
	return netns == (node_netns ? node_netns : bpf_get_netns_cookie(NULL));
}

// route finds out what becomes of a connection, and with FORWARD the pool. PASS leaves it to those who see its
// packets, also where a socket cannot do what the row says: which source address it will have is not known here,
// and it keeps it. The node's own is what others are hidden behind. To keep it is better than not to be served.
static __always_inline enum verdict route(struct bpf_sock_addr *ctx, __u32 rows, const struct endpoint *to,
					  __u64 netns, __u32 *pool)
{
	bool node = is_node(netns), pod = rows & (is_ipv4(&to->addr) ? PODS_KNOWN_V4 : PODS_KNOWN_V6);
	struct target t;

	if (ctx->protocol != IPPROTO_TCP && ctx->protocol != IPPROTO_UDP)
		return PASS;
	if (!node && (only_node || is_loopback(&to->addr)))
		return PASS;
	decide(rows, to, ctx->protocol, node || pod, &t, 0);
	if (node && t.flags & NODE_DENIED)
		t.verdict = DROP;
	else if (t.flags & LIMITED && !(node && t.flags & NODE_ALLOWED))
		return PASS;
	if (t.verdict != FORWARD) {
		if (t.verdict == PASS || !(alone || (node && node_alone)))
			return PASS;
		refused(to, ctx->protocol, &t);
		return t.verdict;
	}
	if (!alone && !node && (t.flags & SNAT_ALWAYS || (t.flags & SNAT_OFFCLUSTER && !pod)))
		return PASS;
	*pool = t.pool;
	return FORWARD;
}

// place_of is where a socket is remembered, if it is.
static __always_inline struct place *place_of(__u64 cookie)
{
	__u32 key = cookie & places;

	return bpf_map_lookup_elem(&sockets, &key);
}

static __always_inline __u64 *claims_of(__u64 cookie)
{
	__u32 key = cookie & places;

	return bpf_map_lookup_elem(&claims, &key);
}

// own_place is the place that a socket has, if it has one. Of most that have none no place is read.
static __always_inline struct place *own_place(__u64 cookie)
{
	__u64 *n = claims_of(cookie);

	if (!n || !*(volatile __u64 *)n)
		return NULL;
	struct place *at = place_of(cookie);

	return at && at->cookie == cookie ? at : NULL;
}

// bear_no_more has a socket that is done with its backend not count as that one's load any more.
static __noinline int bear_no_more(struct place *at)
{
	if (!at || !at->loads)
		return 0;
	struct endpoint service = at->peer.service, backend = at->peer.backend;
	__u32 rows = rows_in_force(), pods = is_ipv4(&service.addr) ? PODS_KNOWN_V4 : PODS_KNOWN_V6;
	struct target t;

	at->loads = 0;
	decide(rows, &service, at->protocol, rows & pods || is_node(at->netns), &t, 0);
	struct pool *pool = t.verdict == FORWARD ? pool_at(rows, t.pool) : 0;

	if (pool && pool->by_load)
		bear(pool->name, &backend, BY_SOCKETS, -1);
	return 0;
}

// take gets a place for a socket, or reports that another one has it. What two try at the same time neither may get.
// Linux 5.10 has no atomic operation that returns what it found; here, who adds first and then reads 1 is alone.
static __always_inline bool take(struct place *at, __u64 cookie)
{
	__u64 *n = claims_of(cookie);

	if (!n)
		return false;
	if (*(volatile __u64 *)n) {
		if (at->cookie != cookie) // only its owner has written that
			return false;
		bear_no_more(at);
		return true;
	}
	__sync_fetch_and_add(n, 1);
	if (*(volatile __u64 *)n == 1)
		return true;
	__sync_fetch_and_add(n, -1);
	return false;
}

// asked_at is a time as places have it. It begins anew after 19 hours.
static __always_inline __u16 asked_at(__u64 time)
{
	return time >> 30;
}

// occupy has a socket's place remember a peer, or what it asks. It reports false if another socket has that place.
static __always_inline bool occupy(__u64 cookie, __u64 netns, const struct peer *p, __u8 protocol, __u16 asked)
{
	struct place *at = place_of(cookie);

	if (!at || !take(at, cookie))
		return false;
	at->peer = *p;
	at->moved = 0;
	at->loads = 0;
	at->netns = netns;
	at->protocol = protocol;
	at->asked = asked;
	barrier();
	at->cookie = cookie;
	return true;
}

// remember lets the socket know its peer. It reports false if there is no place where the agent finds that.
static __always_inline bool remember(struct bpf_sock_addr *ctx, __u64 cookie, __u64 netns, struct peer *p)
{
	if (occupy(cookie, netns, p, ctx->protocol, 0))
		return true;
	struct peer *own = bpf_sk_storage_get(&peers, ctx->sk, p, BPF_SK_STORAGE_GET_F_CREATE);

	if (own)
		*own = *p;
	return false;
}

// is_connected is about a socket of UDP, whose state is the one of TCP then. No hook sees it connect to AF_UNSPEC.
static __always_inline bool is_connected(const struct bpf_sock_addr *ctx)
{
	return ctx->sk->state == BPF_TCP_ESTABLISHED;
}

// peer_of is what a socket asked for when it was connected, and what it got, while it is connected; or else the one
// service that it asks.
static __always_inline struct peer *peer_of(struct bpf_sock_addr *ctx, __u64 cookie)
{
	bool connected = ctx->protocol != IPPROTO_UDP || is_connected(ctx);
	struct place *at = place_of(cookie);

	if (at && at->cookie == cookie)
		return connected == (at->protocol != DATAGRAMS) ? &at->peer : NULL;
	return connected ? bpf_sk_storage_get(&peers, ctx->sk, 0, 0) : NULL;
}

// expect has what comes from a backend come from the service, and tells the agent whom a socket without a place talks to.
static __always_inline void expect(__u64 cookie, const struct endpoint *backend, const struct endpoint *service,
				   __u32 protocol)
{
	struct flow_key back = {.cookie = cookie, .peer = *backend, .back = 1};
	struct flow *known = bpf_map_lookup_elem(&flows, &back);
	struct flow fresh = {.other = *service, .protocol = protocol};

	if (!known || !same(&known->other, service) || known->protocol < protocol)
		bpf_map_update_elem(&flows, &back, &fresh, BPF_ANY);
}

// unexpect is for a socket that connects to an address that is no service's. It may have come there by one before.
static __always_inline void unexpect(struct bpf_sock_addr *ctx, __u64 cookie, const struct endpoint *to)
{
	struct flow_key back = {.cookie = cookie, .peer = *to, .back = 1};
	struct place *at = own_place(cookie);

	if (at) {
		bear_no_more(at);
		at->peer = (struct peer){};
		at->protocol = ctx->protocol;
	}
	// To delete what is not there takes longer than to look.
	bool own = bpf_sk_storage_get(&peers, ctx->sk, 0, 0);

	if (own)
		bpf_sk_storage_delete(&peers, ctx->sk);
	if ((own || ctx->protocol == IPPROTO_UDP) && bpf_map_lookup_elem(&flows, &back))
		bpf_map_delete_elem(&flows, &back);
}

// spill makes flows of what a place knows of a socket that asks more than one service, or a backend by its own address.
// From then on all that it asks are flows. Another thread may use the place at this moment, and finds the one or the other.
static __noinline int spill(__u64 cookie)
{
	struct place *at = place_of(cookie);

	if (!at || !at->peer.backend.port)
		return 0;
	struct flow_key forth = {.cookie = cookie, .peer = at->peer.service};
	struct flow_key back = {.cookie = cookie, .peer = at->peer.backend, .back = 1};
	__u64 now = bpf_ktime_get_ns(), silent = (__u16)(asked_at(now) - at->asked);
	struct flow sends = {.other = back.peer, .last = now - (silent << 30)}, gets = {.other = forth.peer};

	bpf_map_update_elem(&flows, &forth, &sends, BPF_ANY);
	bpf_map_update_elem(&flows, &back, &gets, BPF_ANY);
	at->protocol = IPPROTO_UDP;
	at->peer.backend.port = 0;
	return 0;
}

// forget_service is for a datagram to an address that is no service's: its answers come from there, also if the socket
// got there by a service before. Who talks to a backend both ways at once has the name that was used last.
static __always_inline void forget_service(struct bpf_sock_addr *ctx, __u64 cookie, const struct endpoint *to)
{
	struct flow_key back = {.cookie = cookie, .peer = *to, .back = 1};
	struct peer *p = peer_of(ctx, cookie);

	if (is_connected(ctx))
		return;
	if (p && same(&p->backend, to))
		spill(cookie);
	if (bpf_map_lookup_elem(&flows, &back))
		bpf_map_delete_elem(&flows, &back);
}

// Packets and bytes of a socket that are not in the table of traffic yet. Programs add them there after ADD_JIFFIES, when
// the socket closes, and with each packet after that. Two processors may count packets of a socket at the same time. A
// socket of UDP that asks several Services counts for the one that it asked last.
struct counted {
	struct traffic_key as;
	__u64 added[DIRECTIONS]; // when, in jiffies
	__u64 closed;
	__u64 packets[DIRECTIONS];
	__u64 bytes[DIRECTIONS];
};

#define ADD_JIFFIES 250 // a quarter of a second, or more where the kernel ticks slower

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct counted);
} counting SEC(".maps");

// take_all empties a sum. Linux 5.10 has no operation that does so in one step: what is counted meanwhile stays. If two
// processors take the same, the sum is below zero after that, and who takes it next gives back what was too much.
static __always_inline __u64 take_all(__u64 *sum)
{
	__u64 n = *(volatile __u64 *)sum;

	__sync_fetch_and_add(sum, -n);
	return n;
}

static __noinline int add_counted(struct counted *c, enum direction way)
{
	if (!c || way >= DIRECTIONS)
		return 0;
	__u64 packets = take_all(&c->packets[way]), bytes = take_all(&c->bytes[way]);

	if (packets)
		add_traffic(&c->as, way, packets, bytes);
	return 0;
}

static __always_inline void add_both(struct counted *c)
{
	add_counted(c, TO_BACKEND);
	add_counted(c, TO_CLIENT);
}

static __noinline int count_for(struct bpf_sock_addr *ctx, const struct pool *p, const struct endpoint *backend)
{
	if (!counts_traffic || !p || !backend)
		return 0;
	__u64 now = bpf_jiffies64();
	struct counted fresh = {.as = {.pool = p->name, .backend = *backend}, .added = {now, now}};
	struct counted *own = bpf_sk_storage_get(&counting, ctx->sk, &fresh, BPF_SK_STORAGE_GET_F_CREATE);

	if (own && (own->as.pool != p->name || !same(&own->as.backend, backend))) {
		add_both(own);
		own->as = fresh.as;
	}
	return 0;
}

static __noinline int count_no_more(struct bpf_sock_addr *ctx)
{
	struct counted *own = counts_traffic ? bpf_sk_storage_get(&counting, ctx->sk, 0, 0) : NULL;

	if (own) {
		add_both(own);
		bpf_sk_storage_delete(&counting, ctx->sk);
	}
	return 0;
}

// bear_socket has a socket count as load of its backend, until it closes or asks for another one.
static __noinline int bear_socket(__u64 cookie, const struct pool *p, const struct endpoint *backend)
{
	struct place *at = place_of(cookie);

	if (!at || !p || !backend)
		return 0;
	at->loads = 1;
	return bear(p->name, backend, BY_SOCKETS, 1);
}

// connected translates the address of a connection.
static __always_inline int connected(struct bpf_sock_addr *ctx, struct endpoint *to, bool *changed)
{
	__u64 netns = bpf_get_netns_cookie(ctx), cookie = bpf_get_socket_cookie(ctx);
	struct addr from = client(netns);
	struct peer peer = {.service = *to};
	__u32 rows = rows_in_force(), number = 0;
	enum verdict verdict = route(ctx, rows, to, netns, &number);

	if (verdict == PASS) {
		unexpect(ctx, cookie, to);
		count_no_more(ctx);
		return ALLOWED;
	}
	if (verdict != FORWARD)
		return refuse(verdict);
	struct pool *pool = pool_at(rows, number);

	if (!pool || !choose(rows, number, pool, &from, to, true))
		return refuse(REJECT);
	if (pool->affinity)
		attach(&from, pool->name, to, terms_of(pool));
	peer.backend = *to;
	if (!remember(ctx, cookie, netns, &peer))
		expect(cookie, to, &peer.service, ctx->protocol);
	else if (pool->by_load)
		bear_socket(cookie, pool, to);
	count_for(ctx, pool, to);
	*changed = true;
	return ALLOWED;
}

// had finds the backend of a socket that is connected to the service it names, or that asks no other.
static __always_inline bool had(struct bpf_sock_addr *ctx, __u32 rows, __u64 cookie, __u32 number,
				const struct endpoint *service, struct endpoint *backend)
{
	struct peer *p = peer_of(ctx, cookie);
	struct place *at = place_of(cookie);

	if (!p || !at)
		return false;
	*backend = p->backend;
	bool again = same(&p->service, service), lives = again && membership(rows, backend, number) != STRANGER;

	if (is_connected(ctx))
		return lives;
	__u16 now = asked_at(bpf_ktime_get_ns());

	if (lives && (__u16)(now - at->asked) <= FLOW_IDLE >> 30) {
		at->asked = now;
		return true;
	}
	if (!again)
		spill(cookie);
	return false;
}

// asks_first has the place of a socket that has asked nobody yet remember a backend, if no other socket has it.
static __always_inline bool asks_first(__u64 cookie, __u64 netns, const struct peer *p, __u64 now)
{
	struct place *at = place_of(cookie);

	return at && at->cookie != cookie && occupy(cookie, netns, p, DATAGRAMS, asked_at(now));
}

// asks_again gives the place of a socket that asks one service another backend. Answers of the former one may be on their
// way. Another thread may do the same, and the place has the backend of one: so both have flows, too.
static __always_inline bool asks_again(__u64 cookie, const struct peer *p, __u64 now)
{
	struct place *at = place_of(cookie);

	if (!at || at->cookie != cookie || at->protocol != DATAGRAMS || !same(&at->peer.service, &p->service))
		return false;
	if (!same(&at->peer.backend, &p->backend)) {
		struct endpoint former = at->peer.backend;

		expect(cookie, &former, &p->service, DATAGRAMS);
		expect(cookie, &p->backend, &p->service, DATAGRAMS);
		at->peer.backend = p->backend;
	}
	at->asked = asked_at(now);
	return true;
}

// assign gives a datagram to the backend that its socket had for it, while that has not left, or else to another one.
static __always_inline bool assign(struct bpf_sock_addr *ctx, __u32 rows, const struct flow_key *forth, __u64 netns,
				   __u32 number, struct endpoint *backend)
{
	struct pool *pool = pool_at(rows, number);
	struct flow *known = bpf_map_lookup_elem(&flows, forth);
	__u64 now = bpf_ktime_get_ns();
	struct addr from = client(netns);

	if (!pool)
		return false;
	if (known && since(known->last, now) < FLOW_IDLE) {
		*backend = known->other;
		if (membership(rows, backend, number) != STRANGER) {
			known->last = now;
			expect(forth->cookie, backend, &forth->peer, DATAGRAMS);
			return true;
		}
	}
	if (!choose(rows, number, pool, &from, backend, true))
		return false;
	if (pool->affinity)
		attach(&from, pool->name, backend, terms_of(pool));
	struct peer peer = {.service = forth->peer, .backend = *backend};

	if (!is_connected(ctx) && (asks_again(forth->cookie, &peer, now) ||
				   (!known && asks_first(forth->cookie, netns, &peer, now))))
		return true;
	struct flow fresh = {.other = *backend, .last = now};

	bpf_map_update_elem(&flows, forth, &fresh, BPF_ANY);
	expect(forth->cookie, backend, &forth->peer, DATAGRAMS);
	return true;
}

// sent translates the address of a datagram.
static __always_inline int sent(struct bpf_sock_addr *ctx, struct endpoint *to, bool *changed)
{
	__u64 netns = bpf_get_netns_cookie(ctx), cookie = bpf_get_socket_cookie(ctx);
	__u32 rows = rows_in_force(), number = 0;
	enum verdict verdict = route(ctx, rows, to, netns, &number);

	if (verdict == PASS) {
		forget_service(ctx, cookie, to);
		count_no_more(ctx);
		return ALLOWED;
	}
	if (verdict != FORWARD)
		return refuse(verdict);
	struct flow_key forth = {.cookie = cookie, .peer = *to};
	struct endpoint backend;

	if (!had(ctx, rows, cookie, number, to, &backend) && !assign(ctx, rows, &forth, netns, number, &backend))
		return refuse(REJECT);
	*to = backend;
	count_for(ctx, pool_at(rows, number), to);
	*changed = true;
	return ALLOWED;
}

// translate_back makes a service of a backend: of a connected socket's peer, or of where a datagram comes from.
static __always_inline bool translate_back(struct bpf_sock_addr *ctx, struct endpoint *from)
{
	struct flow_key back = {.cookie = bpf_get_socket_cookie(ctx), .peer = *from, .back = 1};
	struct peer *p = peer_of(ctx, back.cookie);

	if (p && same(&p->backend, from)) {
		*from = p->service;
		return true;
	}
	struct flow *f = bpf_map_lookup_elem(&flows, &back);

	if (f)
		*from = f->other;
	return f;
}

#define TRANSLATE(hook, family, translate)					\
	SEC("cgroup/" #hook #family)						\
	int hook##family(struct bpf_sock_addr *ctx)				\
	{									\
		struct endpoint e;						\
		bool changed = false;						\
										\
		load##family(ctx, &e);						\
		int result = translate(ctx, &e, &changed);			\
										\
		if (changed)							\
			store##family(ctx, &e);					\
		return result;							\
	}

#define TRANSLATE_BACK(hook, family)						\
	SEC("cgroup/" #hook #family)						\
	int hook##family(struct bpf_sock_addr *ctx)				\
	{									\
		struct endpoint e;						\
										\
		load##family(ctx, &e);						\
		if (translate_back(ctx, &e))					\
			store##family(ctx, &e);					\
		return ALLOWED;							\
	}

TRANSLATE(connect, 4, connected)
TRANSLATE(connect, 6, connected)
TRANSLATE(sendmsg, 4, sent)
TRANSLATE(sendmsg, 6, sent)
TRANSLATE_BACK(recvmsg, 4)
TRANSLATE_BACK(recvmsg, 6)
TRANSLATE_BACK(getpeername, 4)
TRANSLATE_BACK(getpeername, 6)

// pass counts a packet of a socket, and lets it pass. A large one that the device cuts counts as its parts.
static __always_inline int pass(struct __sk_buff *skb, enum direction way)
{
	struct bpf_sock *sk = skb->sk ? bpf_sk_fullsock(skb->sk) : NULL;
	struct counted *own = sk ? bpf_sk_storage_get(&counting, sk, 0, 0) : NULL;

	if (!own)
		return ALLOWED;
	__sync_fetch_and_add(&own->packets[way], skb->gso_segs ? skb->gso_segs : 1);
	__sync_fetch_and_add(&own->bytes[way], skb->len);
	__u64 now = bpf_jiffies64();

	if (own->closed || now - own->added[way] >= ADD_JIFFIES) {
		own->added[way] = now;
		add_counted(own, way);
	}
	return ALLOWED;
}

SEC("cgroup_skb/egress")
int sends(struct __sk_buff *skb)
{
	return pass(skb, TO_BACKEND);
}

SEC("cgroup_skb/ingress")
int gets(struct __sk_buff *skb)
{
	return pass(skb, TO_CLIENT);
}

SEC("cgroup/sock_release")
int closed(struct bpf_sock *ctx)
{
	__u64 cookie = bpf_get_socket_cookie(ctx), *n = claims_of(cookie);
	struct place *at = own_place(cookie);

	if (n && at) {
		bear_no_more(at);
		__sync_fetch_and_add(n, -1);
	}
	struct counted *own = counts_traffic ? bpf_sk_storage_get(&counting, ctx, 0, 0) : NULL;

	if (own) {
		own->closed = 1;
		add_both(own);
	}
	return ALLOWED;
}

// These programs trace the connecting sockets of the whole machine. They trace nothing of a connection that is
// answered at once, unless the agent wants to hear of it: then one more program is attached. ICMP errors are not traced.
// The loader fills in the offsets of the kernel's structures (CO-RE).
struct sock_common {
	__be32 skc_rcv_saddr;
	unsigned short skc_family;
	unsigned char skc_state;
	struct {
	} skc_v6_rcv_saddr;
} __attribute__((preserve_access_index));

struct sock {
	struct sock_common __sk_common;
} __attribute__((preserve_access_index));

struct tcp_sock {
	__u32 total_retrans;
} __attribute__((preserve_access_index));

// asked is what a socket asks for that is connecting to a backend.
static __always_inline struct peer *asked(struct sock *sk)
{
	struct place *at = own_place(bpf_get_socket_cookie(sk));
	struct peer *p = at ? &at->peer : bpf_sk_storage_get(&peers, sk, 0, 0);

	return p && p->backend.port ? p : NULL;
}

static __always_inline int tell_of(struct sock *sk, enum result result)
{
	struct peer *p = asked(sk);
	struct addr client = {{0, 0, bpf_htonl(0xffff), sk->__sk_common.skc_rcv_saddr}};

	if (p && sk->__sk_common.skc_family != AF_INET)
		bpf_probe_read_kernel(&client, sizeof(client), &sk->__sk_common.skc_v6_rcv_saddr);
	if (p)
		report(&p->service, &p->backend, &client, IPPROTO_TCP, result);
	return 0;
}

// has_resent says how often a socket has sent its SYN again.
static __always_inline __u32 has_resent(struct sock *sk)
{
	struct tcp_sock *tcp = (struct tcp_sock *)bpf_skc_to_tcp_sock(sk);

	return tcp ? tcp->total_retrans : 0;
}

SEC("tp_btf/tcp_retransmit_skb")
int resends(__u64 *ctx)
{
	struct sock *sk = (struct sock *)ctx[0];

	if (sk->__sk_common.skc_state != BPF_TCP_SYN_SENT || has_resent(sk) > 1)
		return 0;
	return tell_of(sk, IS_UNANSWERED);
}

SEC("tp_btf/tcp_receive_reset")
int is_reset(__u64 *ctx)
{
	struct sock *sk = (struct sock *)ctx[0];

	if (sk->__sk_common.skc_state != BPF_TCP_SYN_SENT || has_resent(sk))
		return 0;
	return tell_of(sk, IS_REFUSED);
}

SEC("tp_btf/inet_sock_set_state")
int is_answered(__u64 *ctx)
{
	if ((int)ctx[1] != BPF_TCP_SYN_SENT || (int)ctx[2] != BPF_TCP_ESTABLISHED)
		return 0;
	struct place *at = own_place(bpf_get_socket_cookie((struct sock *)ctx[0]));

	return at && at->moved ? 0 : tell_of((struct sock *)ctx[0], IS_ANSWERED);
}

char _license[] SEC("license") = "Dual BSD/GPL";
