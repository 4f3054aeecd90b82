// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
// Copyright The Fairlead Authors

// The tables that all programs share.
//
//   frontends: address, port, protocol ─► what becomes of clients, and the number of a pool
//   pools[number]                      ─► which slots are in force, one word
//   slots[first ... first + count)     ─► a backend each
//   chunks                             ─► which of them a client has, in pools that are hashed
//
// Of these, and of who may use what (guards, members, sources, pods), there are two sets. A word says which one is in
// force. The agent fills the other set, flips the word, and takes the first one away, so no program has to be verified
// again. Whatever a program decides, it reads the word once for that, so no decision has a part of each set; the next one
// about the same packet may be by the other.
//
// The tables affinities, flows, sockets, peers and loads, and that of refused packets, are pinned and outlive the
// programs: see pin.go before you change a layout there.
#pragma once

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/in.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

// GO has bpf2go make constants of an enum for the agent, which it does of what the object's types mention. The section
// is none that the kernel sees.
#define GO(name) const enum name *go_##name SEC("go")

// IPv4 addresses are IPv4-mapped (::ffff:a.b.c.d), so that one table serves both families, and sockets of
// IPv6 that connect to such an address.
struct addr {
	__be32 word[4];
};

struct endpoint {
	struct addr addr;
	__be16 port;
	__u16 pad;
};

enum verdict {
	PASS, // no row says anything
	FORWARD,
	REJECT,
	DROP,
};

// Further properties of a row, in a byte.
enum flags {
	LIMITED = 1 << 0,	// only some sources are allowed
	SNAT_OFFCLUSTER = 1 << 1, // the address of clients that are no pods is hidden
	SNAT_ALWAYS = 1 << 2,	// that of all
	NODE_ALLOWED = 1 << 3,	// LIMITED, and every address of the node is allowed
	NODE_DENIED = 1 << 4,	// LIMITED, and none is
} __attribute__((packed));

// Who says what becomes of a connection.
enum level {
	GUARD = 0, // or nobody
	PORT,	   // what is said of an address and port
	ADDRESS,   // of all others of an address
};

struct target {
	__u32 pool;
	__u8 verdict;
	enum flags flags;
	__u16 level; // 0 in the table
};

// A whole address, for what is said of its other ports, has port and protocol 0.
struct frontend_key {
	struct addr addr;
	__be16 port;
	__u8 protocol;
	__u8 pad;
};

// The value repeats the key: while a program looks at a value, the kernel may give its memory to another key.
struct frontend {
	struct frontend_key key;
	struct target any;
	struct target internal; // for the node and its pods, if it has a verdict
};

struct pool {
	__u32 first; // read and written together with count
	__u32 count;
	__u64 name; // the same in every process
	__u32 affinity; // seconds; 0: none
	__u16 owner;	// below OWNERS
	__u16 by_load;	// of two backends it takes the less loaded one; 0: not
};

// Walker's alias method: each slot is taken as often as any other, and gives up a part of that to another one. The slots
// of a pool whose backends the client's address chooses say so, all of them, and where the pool's table is.
struct slot {
	struct endpoint backend;
	__u32 alias;	   // counted from the pool's first; HASHED: number of the table's first chunk
	__u32 share;	   // what the slot keeps, in 2^-32; ~0: all
	__u32 connections; // that were led to its backend; the agent takes them away
};

#define HASHED 0 // in place of a share, which is never that small

// Pools by_load know how many connections are open to each backend. Programs for sockets and those for packets count
// their own, and the agent corrects both (loads.go).
struct load_key {
	__u64 pool; // its name
	struct endpoint backend;
	__u32 pad;
};

enum bearer {
	BY_SOCKETS,
	BY_PACKETS,
	BEARERS,
};
GO(bearer);

struct load {
	__s32 open[BEARERS];
	__u32 weight;
};

// A part of a table for clients: numbers of backends, each counted from the first slot of the pool. Pools with the same
// backends have a table together. Its first chunk says in two halves, the lower one first, how many turns there are in
// those that follow.
#define CHUNK 32

struct chunk {
	__u16 turns[CHUNK];
};

// The backends of pools whose clients are remembered.
struct member_key {
	struct endpoint backend;
	__u32 pool;
};

enum membership {
	STRANGER,
	SERVING,
	DRAINING, // it keeps what it has
};

struct member {
	enum membership is;
	__u32 slot; // one of its slots, if it serves
};

struct guard_key {
	__u32 bits;
	struct addr addr;
};

// What was refused: by an address and port, by an address alone, or, all zero, by guards.
struct refusal {
	struct addr addr;
	__be16 port;
	__u8 protocol;
	__u8 verdict;
};

// Owners of pools share tables that are never to forget what is in use. An owner gets places while it has less than
// GREED times what is free: alone it may have most of a table, and the more it has, the more is left for others
// (Choudhury and Hahne, Dynamic Queue Length Thresholds, 1998). Each table that they share has as many elements of
// `shares`.
enum owners {
	EVERYBODY = 0, // all of them together
	GREED = 8,
	OWNERS = 1 << 12,
};
GO(owners);

enum shared {
	OF_FLOWS,
	OF_AFFINITIES,
	SHARED,
};
GO(shared);

struct share {
	__u32 lent;
	__u32 returned;
};

struct affinity_key {
	struct addr client;
	__u64 pool; // its name
};

struct affinity {
	struct endpoint backend;
	__u16 owner;
	__u16 lasts; // in two seconds
	__u64 last;  // when it was used, by bpf_ktime_get_ns
};

// What a socket that is not connected, and has no place or asks several, has sent: to a Service's address (forth), or got
// from a backend (back).
struct flow_key {
	__u64 cookie;
	struct endpoint peer;
	__u32 back;
};

struct flow {
	struct endpoint other;
	__u32 protocol; // back: of a socket that is connected and has no place; of others 0
	__u64 pad;
	__u64 last; // forth only
};

// What a connected socket has asked for, and what it got.
struct peer {
	struct endpoint service;
	struct endpoint backend;
};

// A place in which one socket at a time is remembered: if it is connected, or while it asks one service alone.
struct place {
	__u64 cookie; // of the socket, or of the one that had the place before
	__u32 moved; // another backend answers in the name of the one that it got
	__u8 protocol; // 0: of a socket of UDP that is not connected
	__u8 loads; // it counts as load of its backend
	__u16 asked; // with 0: when it was used, in 2^30 nanoseconds
	__u64 netns; // cookie of the socket's namespace
	struct peer peer;
};

// The word: which set is in force, and whether the rows recognise pods, in IPv4 and in IPv6.
enum rows {
	SET = 1 << 0,
	PODS_KNOWN_V4 = 1 << 1,
	PODS_KNOWN_V6 = 1 << 2,
};

// Addresses that have all but the last REGION_BITS in common are a region. Each has a bit, by a hash, that is set if rows or
// guards are about an address there. Most connections and packets are for none of those.
enum region {
	REGION_BITS = 8,
	REGIONS = 1 << 16,
};
GO(region);

// The word, and the bits of both sets: a table of one element, which programs find without a look-up.
struct in_force {
	enum rows word;
	__u32 answers; // whether the agent wants to hear of them: outcomes.h
	__u64 regions[2][REGIONS / 64]; // of each set
};

struct in_force current SEC(".data.in_force");

// SETS declares a table of which there are two. The agent makes them, each as one name_set, and none at first.
#define SETS(name, ...)						\
	struct name##_set {					\
		__VA_ARGS__					\
	} name##_set SEC(".maps");				\
	struct {						\
		__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);	\
		__uint(max_entries, 2);				\
		__type(key, __u32);				\
		__array(values, struct name##_set);		\
	} name SEC(".maps")

// Sizes are set when the maps are made. They follow the rows, so what can be allocated at once is: adding to such a
// map takes half the time, and cannot fail for want of memory.

SETS(frontends,
     __uint(type, BPF_MAP_TYPE_HASH);
     __uint(max_entries, 1);
     __type(key, struct frontend_key);
     __type(value, struct frontend););

SETS(pools,
     __uint(type, BPF_MAP_TYPE_ARRAY);
     __uint(map_flags, BPF_F_MMAPABLE | BPF_F_INNER_MAP);
     __uint(max_entries, 1);
     __type(key, __u32);
     __type(value, struct pool););

SETS(slots,
     __uint(type, BPF_MAP_TYPE_ARRAY);
     __uint(map_flags, BPF_F_MMAPABLE | BPF_F_INNER_MAP);
     __uint(max_entries, 1);
     __type(key, __u32);
     __type(value, struct slot););

SETS(chunks,
     __uint(type, BPF_MAP_TYPE_ARRAY);
     __uint(map_flags, BPF_F_MMAPABLE | BPF_F_INNER_MAP);
     __uint(max_entries, 1);
     __type(key, __u32);
     __type(value, struct chunk););

SETS(members,
     __uint(type, BPF_MAP_TYPE_HASH);
     __uint(max_entries, 1);
     __type(key, struct member_key);
     __type(value, struct member););

SETS(guards,
     __uint(type, BPF_MAP_TYPE_LPM_TRIE);
     __uint(map_flags, BPF_F_NO_PREALLOC);
     __uint(max_entries, 1);
     __type(key, struct guard_key);
     __type(value, enum verdict););

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 14);
	__type(key, struct load_key);
	__type(value, struct load);
} loads SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__type(key, struct affinity_key);
	__type(value, struct affinity);
} affinities SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1);
	__type(key, struct flow_key);
	__type(value, struct flow);
} flows SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, SHARED * OWNERS);
	__type(key, __u32);
	__type(value, struct share);
} shares SEC(".maps");

// How often.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1);
	__type(key, struct refusal);
	__type(value, __u64);
} refusals SEC(".maps");

// Sockets, each in the place that its cookie names. Memory of the socket's own (peers) costs connect() five percent, and
// is for connected ones that find their place taken. Who closes gives it back, so that none is ever forgotten.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct place);
} sockets SEC(".maps");

// How many sockets have each place, or try to get it. That is apart from the places, as sockets that come one after the
// other have places one after the other: of these eight are read at a time, and most are in a cache by then. A place
// itself, which is not, is only written to in connect(), and nobody waits for that.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} claims SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct peer);
} peers SEC(".maps");
