package nftables

import (
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"strings"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// A token is what a map holds for a destination, from the lowest bit: the number of the pool, the class, and how one of
// the pool's slots is chosen. Each part leads to a chain of its own, so that there are as many chains as there are
// classes and sizes, and not one for each pair of them. The highest bit is clear.
type token uint32

const (
	poolBits  = 18
	classBits = 4
	sizeBits  = 9

	poolMask  = 1<<poolBits - 1
	classMask = (1<<classBits - 1) << poolBits
	sizeMask  = (1<<sizeBits - 1) << (poolBits + classBits)
)

func newToken(c class, s size, pool uint32) token {
	return token(c.id() | s.id() | pool)
}

func (t token) pool() uint32 { return uint32(t) & poolMask }

// verdict is that of the token's class; see class.number.
func (t token) verdict() model.Verdict {
	class := uint32(t) & classMask >> poolBits
	if kind := (max(class, 1)-1)%kinds + 1; kind > forwarding {
		return model.Forward + model.Verdict(kind-forwarding)
	}
	return model.Forward
}

// A size is how many slots a pool has, whether they lead to names, and in which map they are. A number above exactSizes
// is rounded up to one of eight in each power of two. A packet that comes to a slot beyond the pool's last one tries
// again.
type size struct {
	slots int
	named bool // all of these are in one map
	shard int
}

const (
	exactSizes = 128
	stepBits   = 3 // of the numbers that sizes are rounded to, after the first one
	// namedSizes is half of all numbers of sizes.
	namedSizes = 1 << (sizeBits - 1)
)

// sizeOf is the size of a pool with so many slots.
func sizeOf(slots int, named bool, shard int) size {
	if slots > exactSizes {
		step := 1 << (bits.Len(uint(slots-1)) - 1 - stepBits)
		slots = (slots + step - 1) / step * step
	}
	return size{slots, named, shard}
}

// below is the next smaller size.
func (s size) below() int {
	return s.slots - 1<<(bits.Len(uint(s.slots-1))-1-stepBits)
}

// number is that of the size among all of its kind, from 0 on.
func (s size) number() uint32 {
	if s.slots <= exactSizes {
		return uint32(s.slots - 1)
	}
	octave := bits.Len(uint(s.slots-1)) - 1
	step := s.slots >> (octave - stepBits) // from 9 to 16
	return uint32(exactSizes + (octave-bits.Len(exactSizes-1))<<stepBits + step - 1<<stepBits - 1)
}

// id is the key of the size's chain. The number of a pool of this size ends as it does.
func (s size) id() uint32 {
	n := s.number()
	if s.named {
		n += namedSizes
	}
	return n<<(poolBits+classBits) | uint32(s.shard)
}

func (s size) chain() string {
	switch {
	case s.named:
		return fmt.Sprintf("choose-%d-named", s.slots)
	case s.shard == 0:
		return fmt.Sprintf("choose-%d", s.slots)
	}
	return fmt.Sprintf("choose-%d-%s", s.slots, shardName(s.shard))
}

// choose makes the chain of a size, unless there is one.
func (t *table) choose(s size) error {
	if t.sizes[s] {
		return nil
	}
	if err := t.SetChain(t.sizeChain(s)); err != nil {
		return err
	}
	t.lead(choosers, s.id(), s.chain())
	t.sizes[s] = true
	return nil
}

// sizeChain draws a slot. If that names a backend, the packet's priority holds the handle afterwards, and the packet
// comes back.
func (t *table) sizeChain(s size) nft.Chain {
	c := nft.Chain{Name: s.chain()}
	among := []int{s.slots}
	if s.slots > exactSizes {
		// Each time at most one slot in nine is missing, so that one connection in 700 at most is left for the slots
		// below the next smaller size.
		among = []int{s.slots, s.slots, s.slots, s.below()}
	}
	for _, n := range among {
		if s.named {
			c.Rules = append(c.Rules, nft.NewRule("", append(draw(n, "choices"), nft.StoreMeta(expr.MetaKeyPRIORITY, 0))...))
		} else {
			c.Rules = append(c.Rules, nft.NewRule("", t.translate(draw(n, shardName(s.shard)))...))
		}
	}
	if s.named {
		return c
	}
	// Each look-up sees the ruleset as it is at that moment, the chain as it was when the packet
	// came. A slot that is gone meanwhile must not let the packet pass untranslated.
	gone := nft.NewRule("the slot is gone", t.translate(draw(1, shardName(s.shard)))...)
	c.Rules = append(c.Rules, gone, nft.NewRule("", nft.Drop()))
	return c
}

// draw puts what a map holds for the token's pool and a random one of n slots at word 0. Where the priority holds a
// handle already there is nothing: no pool has that number.
func draw(n int, from string) []any {
	return []any{
		nft.LoadMeta(expr.MetaKeyPRIORITY, 0), nft.Bits(0, handleBit|poolMask, 0), random(n), nft.Find(from, 0),
	}
}

// random puts a random number below n at word 1.
func random(n int) any {
	return &expr.Numgen{Register: nft.Word(1), Modulus: uint32(n), Type: unix.NFT_NG_RANDOM}
}

// adoptSizes takes over the chains of sizes that the kernel has, as some pool may have one of them one day.
func (t *table) adoptSizes() error {
	var errs []error
	for key, chain := range maps.Clone(t.Found(choosers)) {
		s := size{named: strings.HasSuffix(chain, "-named"), shard: t.shardOf(nft.Number([]byte(key)))}
		_, err := fmt.Sscanf(chain, "choose-%d", &s.slots)
		named := s.chain() == chain && key == string(nft.Native(s.id()))
		if err == nil && s.slots > 0 && s == sizeOf(s.slots, s.named, s.shard) && named {
			errs = append(errs, t.choose(s))
		}
	}
	return errors.Join(errs...)
}

// An exit is a number by which a verdict map leads to a chain.
type exit struct {
	set int
	id  uint32
}

// lead has a verdict map lead to a chain.
func (t *table) lead(set int, id uint32, chain string) {
	t.Own(exit{set, id}, nft.Entry{Set: set, Key: string(nft.Native(id)), Data: chain})
}

func (t *table) unlead(set int, id uint32) { t.Own(exit{set, id}) }

var errTooMany = errors.New("too many pools, pools with session affinity or weights, or backends of one of those")
