// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
// Copyright The Fairlead Authors

// What becomes of a connection: the rows, and the choice of a backend. Knows neither sockets nor packets.
#pragma once

#include "maps.h"

#define SECOND 1000000000ULL

// since is the time from a moment until now. Another processor may have noted one that is later than what is now here, and
// the agent one before the machine was there.
static __always_inline __u64 since(__u64 last, __u64 now)
{
	__s64 time = now - last;

	return time > 0 ? time : 0;
}

static __always_inline bool same_addr(const struct addr *a, const struct addr *b)
{
	return a->word[3] == b->word[3] && a->word[2] == b->word[2] &&
	       a->word[1] == b->word[1] && a->word[0] == b->word[0];
}

static __always_inline bool same(const struct endpoint *a, const struct endpoint *b)
{
	return a->port == b->port && same_addr(&a->addr, &b->addr);
}

static __always_inline bool is_ipv4(const struct addr *a)
{
	return !a->word[0] && !a->word[1] && a->word[2] == bpf_htonl(0xffff);
}

static __always_inline bool is_loopback(const struct addr *a)
{
	if (is_ipv4(a))
		return (a->word[3] & bpf_htonl(0xff000000)) == bpf_htonl(0x7f000000);
	return !a->word[0] && !a->word[1] && !a->word[2] && a->word[3] == bpf_htonl(1);
}

// rows_in_force is the word that says which tables a program reads, and what they know.
static __always_inline __u32 rows_in_force(void)
{
	return *(volatile __u32 *)&current.word;
}

// is_about says whether there may be a row or a guard about an address. If not there is none: the bit is there before the
// row, and goes after it (regions.go).
static __always_inline bool is_about(__u32 rows, const struct addr *a)
{
	__u32 low = bpf_ntohl(a->word[3]), high = a->word[0] * 31 + a->word[1] * 37 + a->word[2] * 41 + (low >> 24);
	__u64 region = low >> REGION_BITS ^ high * 0x9e3779b1U >> 16;

	asm volatile("" : "+r"(region)); // the compiler sees the limit in what is above, Linux 5.10 only in what follows
	region %= REGIONS;
	return ((volatile __u64 *)current.regions[rows & SET])[region / 64] >> region % 64 & 1;
}

// find_in looks up a key in a table of the set that `rows` says.
static __always_inline void *find_in(void *table, __u32 rows, const void *key)
{
	__u32 set = rows & SET;
	void *map = bpf_map_lookup_elem(table, &set);

	return map ? bpf_map_lookup_elem(map, key) : 0;
}

// row reads what one key says to a client. It reports false if nothing does. Where the node and its pods are told
// something else than others, it sets `two`, if that is wanted.
static __always_inline bool row(__u32 rows, const struct frontend_key *key, bool internal, struct target *t, bool *two)
{
	// A mismatch means that the element was replaced at this moment; the next look finds what is there now.
	for (int i = 0; i < 4; i++) {
		struct frontend *f = find_in(&frontends, rows, key);

		if (!f)
			return false;
		*t = internal && f->internal.verdict ? f->internal : f->any;
		if (two && f->internal.verdict)
			*two = true;
		barrier();
		if (same_addr(&f->key.addr, &key->addr) && f->key.port == key->port &&
		    f->key.protocol == key->protocol)
			return t->verdict != PASS;
	}
	return false;
}

// decide says what becomes of a connection to an address and port.
static __always_inline void decide(__u32 rows, const struct endpoint *to, __u8 protocol, bool internal,
				   struct target *t, bool *two)
{
	struct frontend_key key = {.addr = to->addr, .port = to->port, .protocol = protocol};

	*t = (struct target){};
	if (!is_about(rows, &to->addr))
		return;
	if (row(rows, &key, internal, t, two)) {
		t->level = PORT;
		return;
	}
	key.port = 0;
	key.protocol = 0;
	if (row(rows, &key, internal, t, two)) {
		t->level = ADDRESS;
		return;
	}

	struct guard_key guard = {.bits = 128, .addr = to->addr};
	enum verdict *verdict = find_in(&guards, rows, &guard);

	*t = (struct target){.verdict = verdict ? *verdict : PASS};
}

// refused counts a connection that is not to be. The first two at the same moment may count as one.
static __noinline int refused(const struct endpoint *to, __u8 protocol, const struct target *t)
{
	if (!to || !t)
		return 0;
	struct refusal key = {.verdict = t->verdict};
	__u64 one = 1;

	if (t->level)
		key.addr = to->addr;
	if (t->level == PORT) {
		key.port = to->port;
		key.protocol = protocol;
	}
	__u64 *n = bpf_map_lookup_elem(&refusals, &key);

	if (n)
		__sync_fetch_and_add(n, 1);
	else
		bpf_map_update_elem(&refusals, &key, &one, BPF_NOEXIST);
	return 0;
}

static __always_inline struct member *member(__u32 rows, const struct endpoint *backend, __u32 pool)
{
	struct member_key key = {.backend = *backend, .pool = pool};

	return find_in(&members, rows, &key);
}

static __always_inline enum membership membership(__u32 rows, const struct endpoint *backend, __u32 pool)
{
	struct member *m = member(rows, backend, pool);

	return m ? m->is : STRANGER;
}

static __always_inline struct pool *pool_at(__u32 rows, __u32 number)
{
	return find_in(&pools, rows, &number);
}

static __always_inline struct slot *slot_at(__u32 rows, __u32 first, __u32 index)
{
	__u32 key = first + index;

	return find_in(&slots, rows, &key);
}

// hash mixes an address (the finalizer of MurmurHash3): with the same seed it is the same on all nodes, and in the tests.
static __always_inline __u64 hash(const struct addr *a, __u64 seed)
{
	__u64 h = ((__u64)a->word[0] << 32 | a->word[1]) ^ seed;

	for (int i = 0; i < 2; i++) {
		h ^= h >> 33;
		h *= 0xff51afd7ed558ccdULL;
		h ^= h >> 33;
		h *= 0xc4ceb9fe1a85ec53ULL;
		h ^= h >> 33;
		if (!i)
			h ^= (__u64)a->word[2] << 32 | a->word[3];
	}
	return h;
}

// turn_of is the number of a client's backend in the table that begins with a chunk.
static __always_inline __u32 turn_of(__u32 rows, __u32 table, const struct addr *client)
{
	struct chunk *c = find_in(&chunks, rows, &table);

	if (!c)
		return 0;
	__u32 size = c->turns[0] | (__u32)c->turns[1] << 16;
	__u32 turn = (hash(client, 0) & 0xffffffff) * size >> 32, key = table + 1 + turn / CHUNK;

	c = find_in(&chunks, rows, &key);
	return c ? c->turns[turn % CHUNK] : 0;
}

// Nobody outside knows it.
const volatile __u64 secret;

// constant is a random number that stays the same for a client, while it may not be known who is one: what it begins at
// the same time reaches one backend. It is another one after the time for which a pool remembers clients.
static __always_inline __u32 constant(const struct pool *p, const struct addr *client, __u64 now)
{
	return hash(client, secret ^ p->name ^ now / (SECOND * (p->affinity ? p->affinity : 1)));
}

// pick takes a slot, its own or its alias's or the client's, and counts that, if it is to. Slots and chunks are used
// again only when no program can have read the word that led to them.
static __always_inline bool pick(__u32 rows, struct pool *p, const struct addr *client, __u32 random,
				 struct endpoint *backend, bool counts)
{
	__u64 word = *(volatile __u64 *)p;
	__u32 first = word, count = word >> 32;
	__u64 at = (__u64)random * count; // the slot, and in the lower half how far into it
	struct slot *s = slot_at(rows, first, at >> 32);

	if (s && s->share == HASHED)
		s = slot_at(rows, first, turn_of(rows, s->alias, client));
	else if (s && s->share != ~0U && (__u32)at >= s->share)
		s = slot_at(rows, first, s->alias);
	if (!s || !count)
		return false;
	*backend = s->backend;
	if (counts)
		__sync_fetch_and_add(&s->connections, 1);
	return true;
}

static __always_inline struct load *load_of(__u64 pool, const struct endpoint *backend)
{
	struct load_key key = {.pool = pool, .backend = *backend};

	return bpf_map_lookup_elem(&loads, &key);
}

// bear notes a connection more to a backend, or one less. What began before it was counted may end: that is below zero.
static __noinline int bear(__u64 pool, const struct endpoint *backend, enum bearer by, __s32 more)
{
	struct load *l = backend && by < BEARERS ? load_of(pool, backend) : 0;

	if (l && (more > 0 || *(volatile __s32 *)&l->open[by] > 0))
		__sync_fetch_and_add(&l->open[by], more);
	return 0;
}

static __always_inline __s64 open_of(const struct load *l)
{
	return (__s64)l->open[BY_SOCKETS] + l->open[BY_PACKETS];
}

// drawn is a slot by weight: at says which one, and in the lower half how far into it.
static __always_inline __u32 drawn(__u32 rows, __u32 first, __u64 at)
{
	__u32 own = at >> 32;
	struct slot *s = slot_at(rows, first, own);

	return s && s->share != ~0U && (__u32)at >= s->share ? s->alias : own;
}

// pick_lesser takes, of two backends that are drawn by weight, the one with fewer connections for its weight.
static __noinline int pick_lesser(__u32 rows, struct pool *p, struct endpoint *backend, bool counts)
{
	if (!p || !backend)
		return false;
	__u64 word = *(volatile __u64 *)p;
	__u32 first = word, count = word >> 32;

	if (!count)
		return false;
	__u64 at = (__u64)bpf_get_prandom_u32() * count, next = (__u64)bpf_get_prandom_u32() * (count - 1);

	if (next >> 32 >= at >> 32)
		next += 1ULL << 32; // another slot
	__u32 one = drawn(rows, first, at), other = count > 1 ? drawn(rows, first, next) : one;

	if (other == one && count > 1) // by an alias: one of both slots is another backend's
		other = one == next >> 32 ? at >> 32 : next >> 32;
	struct slot *s = slot_at(rows, first, one), *t = slot_at(rows, first, other);

	if (!s || !t)
		return false;
	struct load *mine = load_of(p->name, &s->backend), *its = load_of(p->name, &t->backend);

	if (mine && its && open_of(its) * mine->weight < open_of(mine) * its->weight)
		s = t;
	*backend = s->backend;
	if (counts)
		__sync_fetch_and_add(&s->connections, 1);
	return true;
}

// keeps gives a client the backend that it had, if that serves.
static __always_inline bool keeps(__u32 rows, __u32 pool, const struct endpoint *backend, bool counts)
{
	struct member *m = member(rows, backend, pool);

	if (!m || m->is != SERVING)
		return false;
	struct slot *s = slot_at(rows, m->slot, 0);

	if (s && counts)
		__sync_fetch_and_add(&s->connections, 1);
	return true;
}

// client stands for the address that a socket does not have yet: all sockets of a namespace are one client.
static __always_inline struct addr client(__u64 netns)
{
	return (struct addr){{~0U, 0, netns >> 32, netns}};
}

// choose gives a client a backend of a pool: the one that it had, if the pool has affinity.
static __always_inline bool choose(__u32 rows, __u32 number, struct pool *p, const struct addr *client,
				   struct endpoint *backend, bool counts)
{
	if (p->by_load)
		return pick_lesser(rows, p, backend, counts);
	if (!p->affinity)
		return pick(rows, p, client, bpf_get_prandom_u32(), backend, counts);

	struct affinity_key key = {.client = *client, .pool = p->name};
	struct affinity *a = bpf_map_lookup_elem(&affinities, &key);
	__u64 now = bpf_ktime_get_ns();

	if (a && since(a->last, now) < p->affinity * SECOND) {
		*backend = a->backend;
		if (keeps(rows, number, backend, counts)) {
			a->last = now;
			return true;
		}
	}
	return pick(rows, p, client, constant(p, client, now), backend, counts);
}

// How many elements of tables owners share.
const volatile __u32 room[SHARED];

// The terms of a pool for what its clients begin: whose it is, and for how long they keep their backends, in two
// seconds. The lower half is for others.
enum terms {
	TERMS_OWNER = 32, // where it begins
	TERMS_LASTS = 48,
};
GO(terms);

static __always_inline __u64 terms_of(const struct pool *p)
{
	return (__u64)p->owner << TERMS_OWNER | (__u64)((p->affinity + 1) / 2) << TERMS_LASTS;
}

static __always_inline __u32 owner_of(__u64 terms)
{
	return (terms >> TERMS_OWNER) % OWNERS;
}

// give_back returns elements to an owner's share of a table.
static __always_inline void give_back(enum shared of, __u32 owner, __u32 n)
{
	__u32 first = of * OWNERS, at = first + owner;
	struct share *all = bpf_map_lookup_elem(&shares, &first), *own = bpf_map_lookup_elem(&shares, &at);

	if (all)
		__sync_fetch_and_add(&all->returned, n);
	if (owner && own)
		__sync_fetch_and_add(&own->returned, n);
}

// lend gives elements to an owner if there are some left for it.
static __always_inline bool lend(enum shared of, __u32 owner, __u32 n)
{
	__u32 first = of * OWNERS, at = first + owner;
	struct share *all = bpf_map_lookup_elem(&shares, &first), *own = bpf_map_lookup_elem(&shares, &at);

	if (!all || !own)
		return false;
	__s64 left = (__s64)room[of] - (__s32)(all->lent - all->returned) - n;

	if (left < 0 || (__s64)(__s32)(own->lent - own->returned) + n > GREED * left)
		return false;
	__sync_fetch_and_add(&all->lent, n);
	if (owner)
		__sync_fetch_and_add(&own->lent, n);
	return true;
}

// attach has a client keep its backend, if the terms are so, as it is known by now that there is such a client: who begins
// something need not be whom it names. Where its pool's owner has no room left, `constant` alone has it do so.
static __noinline int attach(const struct addr *client, __u64 pool, const struct endpoint *backend, __u64 terms)
{
	if (!client || !backend || !(terms >> TERMS_LASTS))
		return 0;
	struct affinity_key key = {.client = *client, .pool = pool};
	struct affinity fresh = {
		.backend = *backend, .owner = owner_of(terms), .lasts = terms >> TERMS_LASTS, .last = bpf_ktime_get_ns(),
	};

	struct affinity *known = bpf_map_lookup_elem(&affinities, &key);

	if (known && same(&known->backend, backend) && known->lasts == fresh.lasts) {
		known->last = fresh.last;
		return 0;
	}
	if (known)
		return bpf_map_update_elem(&affinities, &key, &fresh, BPF_ANY);
	if (!lend(OF_AFFINITIES, fresh.owner, 1))
		return 0;
	if (bpf_map_update_elem(&affinities, &key, &fresh, BPF_NOEXIST))
		give_back(OF_AFFINITIES, fresh.owner, 1);
	return 0;
}
