package nftables

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/internal/nft"
)

// Each pool with affinity has a memory of its own: a map that its rules fill, from clients to handles, and a chain with
// those rules.
//
//	pool, size ─► choose ─► handle ─► memories ─► affinity-1: the choice, unless there is one ─► known: dnat

const memoryPrefix = "affinity-"

func memoryName(number uint32) string { return fmt.Sprint(memoryPrefix, number) }

// memorySet is the map of a pool, to be made where so many pools have one.
func (t *table) memorySet(name string, pools int) *nft.Set {
	return &nft.Set{
		Name: name, Flags: unix.NFT_SET_MAP | unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL,
		Key: []nft.Field{t.Family.Address}, Data: []nft.Field{nft.Priority}, Maximum: nft.ClientsOf(pools),
	}
}

// memoryNumber is the number in the name of such a map, if it is the name of one.
func memoryNumber(name string) (uint32, bool) {
	n, ok := numberIn(name, memoryPrefix)
	return n, ok && n >= minAffinity && n <= maxAffinity
}

// numberIn is the number in a name that has it after a prefix, and is written as Go writes it.
func numberIn(name, prefix string) (uint32, bool) {
	text, ok := strings.CutPrefix(name, prefix)
	n, err := strconv.ParseUint(text, 10, 32)
	return uint32(n), ok && err == nil && strconv.FormatUint(n, 10) == text
}

// ownSet is the form of the sets that not every table has.
func (t *table) ownSet(name string) *nft.Set {
	if isShard(name) {
		return shardSet(t.Family, 0)
	}
	if _, ok := memoryNumber(name); !ok {
		return nil
	}
	return t.memorySet(name, 0)
}

// memoryOf is the map of a pool that has one.
func (t *table) memoryOf(n *names) *nft.Set { return t.ownSet(memoryName(n.number)) }

// setMemory has a pool remember its clients for a time.
func (t *table) setMemory(p *pool, lasts time.Duration) error {
	p.lasts = lasts
	if lasts == 0 {
		return nil
	}
	name := memoryName(p.names.number)
	t.AddSet(t.memorySet(name, len(t.FoundSets)-len(t.Sets)))
	if err := t.SetChain(t.memoryChain(name, lasts)); err != nil {
		return err
	}
	t.lead(memories, uint32(newHandle(p.names.number, 0)), name)
	return nil
}

// deleteMemory forgets all clients of a pool that is gone.
func (t *table) deleteMemory(number uint32) {
	name := memoryName(number)
	t.unlead(memories, uint32(newHandle(number, 0)))
	if _, exists := t.Chains[name]; exists {
		t.DeleteChain(name)
	}
	if t.FoundSets[name] {
		t.DeleteSet(name)
	}
}

// memoryChain remembers the backend of which the packet's priority holds the handle, and goes to it. Where one is
// remembered already, its time begins anew (nft_rhash_update in the kernel's net/netfilter/nft_set_hash.c keeps the
// data of what it finds), and the chain goes to that one. If the memory is full, the chain goes to the one just chosen.
func (t *table) memoryChain(name string, lasts time.Duration) nft.Chain {
	n := t.Family.Address.Words()
	load, store := nft.LoadMeta(expr.MetaKeyPRIORITY, n), nft.StoreMeta(expr.MetaKeyPRIORITY, 0)
	client := t.Family.Load(t.Family.Source, 0)
	memory := func(operation uint32, timeout time.Duration) any {
		return &expr.Dynset{
			SrcRegKey: nft.Word(0), SrcRegData: nft.Word(n), SetName: name, Operation: operation, Timeout: timeout,
		}
	}
	recall := []any{client, nft.Find(name, 0), store}
	if defect.Is(defect.NFTablesAffinity) {
		recall = recall[:len(recall)-1]
	}
	return nft.Chain{Name: name, Rules: []nft.Rule{
		nft.NewRule("remember", client, load, memory(unix.NFT_DYNSET_OP_UPDATE, lasts)),
		nft.NewRule("recall", recall...),
		nft.NewRule("", nft.Jump(chainKnown)),
		// Normally forget has been here before. The client's next attempt gets another backend.
		nft.NewRule("the backend is gone", client, load, memory(nft.DynsetDelete, 0)),
		nft.NewRule("", nft.Drop()),
	}}
}
