// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
// Copyright The Fairlead Authors

// What it costs a program to remember flows: in a table of its own, and in the kernel's connection tracking. Each program
// does one thing once, to the flow that was added last, or adds the next one.
#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

// As large as those of the plane: see dataplane/ebpf/bpf/flows.h.
struct key {
	__u32 client[5];
	__u32 service[5];
	__u32 hook;
};

struct value {
	__u32 word[20];
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1 << 18);
	__type(key, struct key);
	__type(value, struct value);
} table SEC(".maps");

__u32 port;   // of the client that was added last; the address has what is beyond 16 bits
__u32 failed; // how often

// What the programs use of these; the kernel has more.
struct nf_conn {
	unsigned long status;
};

struct nf_conn___init {
	struct nf_conn ct;
};

struct bpf_ct_opts {
	__s32 netns_id;
	__s32 error;
	__u8 l4proto;
	__u8 dir;
	__u16 ct_zone_id;
	__u8 ct_zone_dir;
	__u8 reserved[3];
};

union nf_inet_addr {
	__u32 all[4];
	__be32 ip;
};

enum nf_nat_manip_type {
	NF_NAT_MANIP_SRC,
	NF_NAT_MANIP_DST,
};

struct nf_conn *bpf_skb_ct_lookup(struct __sk_buff *skb, struct bpf_sock_tuple *tuple, __u32 tuple_size,
				  struct bpf_ct_opts *opts, __u32 opts_size) __ksym;
struct nf_conn___init *bpf_skb_ct_alloc(struct __sk_buff *skb, struct bpf_sock_tuple *tuple, __u32 tuple_size,
					struct bpf_ct_opts *opts, __u32 opts_size) __ksym;
int bpf_ct_set_nat_info(struct nf_conn___init *ct, union nf_inet_addr *addr, int port,
			enum nf_nat_manip_type manip) __ksym;
void bpf_ct_set_timeout(struct nf_conn___init *ct, __u32 timeout) __ksym;
struct nf_conn *bpf_ct_insert_entry(struct nf_conn___init *ct) __ksym;
void bpf_ct_release(struct nf_conn *ct) __ksym;

#define SERVICE bpf_htonl(0x0a600001) // 10.96.0.1
#define BACKEND bpf_htonl(0x0af40001)
#define NODE bpf_htonl(0xc0000201)
#define CLIENT 0xc6120000 // 198.18.0.0/15

static __always_inline int done(bool ok)
{
	if (!ok)
		failed++;
	return TC_ACT_OK;
}

static __always_inline struct key key_of(__u32 n, __u32 hook)
{
	return (struct key){.client = {[3] = n >> 16, [4] = n}, .service = {[3] = SERVICE, [4] = 80}, .hook = hook};
}

SEC("tc")
int own_find(struct __sk_buff *skb)
{
	struct key key = key_of(port, 0);

	return done(bpf_map_lookup_elem(&table, &key));
}

static __always_inline int add_own(__u32 entries)
{
	struct value value = {};
	__u32 n = ++port;

	for (__u32 i = 0; i < entries; i++) {
		struct key key = key_of(n, i);

		if (bpf_map_update_elem(&table, &key, &value, BPF_NOEXIST))
			return done(false);
	}
	return done(true);
}

// The flow, and its way back.
SEC("tc")
int own_add(struct __sk_buff *skb)
{
	return add_own(2);
}

// The client is hidden: both ways at ingress and at egress.
SEC("tc")
int own_add_hidden(struct __sk_buff *skb)
{
	return add_own(4);
}

static __always_inline struct bpf_sock_tuple tuple_of(__u32 n)
{
	return (struct bpf_sock_tuple){.ipv4 = {
		.saddr = bpf_htonl(CLIENT + (n >> 16)), .sport = n, .daddr = SERVICE, .dport = bpf_htons(80),
	}};
}

SEC("tc")
int conntrack_find(struct __sk_buff *skb)
{
	struct bpf_sock_tuple tuple = tuple_of(port);
	struct bpf_ct_opts opts = {.netns_id = BPF_F_CURRENT_NETNS, .l4proto = IPPROTO_TCP};
	struct nf_conn *ct = bpf_skb_ct_lookup(skb, &tuple, sizeof(tuple.ipv4), &opts, sizeof(opts));

	if (!ct)
		return done(false);
	bpf_ct_release(ct);
	return done(true);
}

static __always_inline int add_conntrack(struct __sk_buff *skb, bool hidden)
{
	__u32 n = ++port;
	struct bpf_sock_tuple tuple = tuple_of(n);
	struct bpf_ct_opts opts = {.netns_id = BPF_F_CURRENT_NETNS, .l4proto = IPPROTO_TCP};
	struct nf_conn___init *fresh = bpf_skb_ct_alloc(skb, &tuple, sizeof(tuple.ipv4), &opts, sizeof(opts));
	union nf_inet_addr backend = {.ip = BACKEND + bpf_htonl(n & 0xff)}, node = {.ip = NODE};

	if (!fresh)
		return done(false);
	bpf_ct_set_timeout(fresh, 60000);
	if (bpf_ct_set_nat_info(fresh, &backend, 8080, NF_NAT_MANIP_DST) ||
	    (hidden && bpf_ct_set_nat_info(fresh, &node, 0, NF_NAT_MANIP_SRC)))
		failed++;
	struct nf_conn *ct = bpf_ct_insert_entry(fresh);

	if (!ct)
		return done(false);
	bpf_ct_release(ct);
	return done(true);
}

SEC("tc")
int conntrack_add(struct __sk_buff *skb)
{
	return add_conntrack(skb, false);
}

SEC("tc")
int conntrack_add_hidden(struct __sk_buff *skb)
{
	return add_conntrack(skb, true);
}

char _license[] SEC("license") = "Dual BSD/GPL";
