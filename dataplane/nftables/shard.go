package nftables

import (
	"fmt"
	"math/bits"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// Slots are in several maps, the shards: a pool's are in the one that the last bits of its number name. The kernel
// lists a map in time that grows with the square of its elements: for each message it walks from the start to where it
// was (nft_rhash_walk in its net/netfilter/nft_set_hash.c). And it walks all of a map when a chain refers to it for the
// first time (nf_tables_bind_set in its net/netfilter/nf_tables_api.c). How many there are, a power of two, is decided
// when the table is made.
const (
	leastShards, mostShards = 16, 256

	// slotsPerShard are as many as a shard is to have at most, if there need not be more than mostShards.
	slotsPerShard = 1 << 12
)

// shardName is the name of one of these maps.
func shardName(shard int) string {
	if shard == 0 {
		return "slots"
	}
	return fmt.Sprint("slots-", shard)
}

// isShard reports whether a set has such a name.
func isShard(name string) bool {
	n, ok := numberIn(name, "slots-")
	return ok && n > 0 && n < mostShards
}

func shardSet(f nft.Family, shard int) *nft.Set {
	return &nft.Set{
		Name: shardName(shard), Flags: unix.NFT_SET_MAP, Key: slotFields(), Data: []nft.Field{f.Address, nft.Port},
	}
}

func slotFields() []nft.Field { return []nft.Field{nft.Priority, nft.Index} }

func (t *table) shardOf(number uint32) int { return int(number) & (t.shards - 1) }

// divide has the table have so many shards.
func (t *table) divide(shards int) {
	for ; t.shards < shards; t.shards++ {
		s := shardSet(t.Family, t.shards)
		s.Counts = t.Sets[slots].Counts
		t.Add(s)
	}
	t.Sets[choosers].Maximum = uint32(t.shards) << sizeBits
}

// foundShards are how many the kernel's table has.
func (t *table) foundShards() int {
	last := mostShards - 1
	for last >= leastShards && !t.FoundSets[shardName(last)] {
		last--
	}
	return 1 << bits.Len(uint(last))
}

// wantedShards are how many a table for the rows has.
func (t *table) wantedShards(s *model.State) int {
	n, shards := 0, leastShards
	for id, p := range s.Pools {
		if id.V6 == t.Family.V6() {
			n += len(p.Backends)
		}
	}
	for shards < mostShards && n > shards*slotsPerShard {
		shards *= 2
	}
	return shards
}
