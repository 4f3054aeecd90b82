package ipvs

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nft"
)

// Each pool with affinity has a memory of its own: two sets that its rules fill, and two chains with those rules.
//
//	class ─► recallers ─► recall-4: a client that clients-4 has goes where affinity-4 says, past IPVS
//	IPVS has chosen ─► learners ─► remember-4
const (
	affinityPrefix = "affinity-"
	clientsPrefix  = "clients-"
	recallPrefix   = "recall-"
	rememberPrefix = "remember-"
)

func ownName(prefix string, number uint32) string { return fmt.Sprint(prefix, number) }

// ownNumber is the pool's number in the name of one of its sets or chains.
func ownNumber(name string) (uint32, bool) {
	for _, prefix := range []string{affinityPrefix, clientsPrefix, recallPrefix, rememberPrefix} {
		if text, ok := strings.CutPrefix(name, prefix); ok {
			n, err := strconv.ParseUint(text, 10, 32)
			return uint32(n), err == nil && n > 0 && n <= nft.MaxNumber && ownName(prefix, uint32(n)) == name
		}
	}
	return 0, false
}

// ownSet is the form of the sets that not every table has.
func (t *table) ownSet(name string) *nft.Set {
	if _, ok := ownNumber(name); !ok {
		return nil
	}
	s := &nft.Set{
		Name: name, Flags: unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL, Key: []nft.Field{t.Family.Address},
		Maximum: nft.ClientsOf(len(t.memories)),
	}
	if strings.HasPrefix(name, affinityPrefix) {
		s.Flags, s.Data = s.Flags|unix.NFT_SET_MAP, []nft.Field{t.Family.Address, nft.Port}
	}
	return s
}

func (t *table) affinityOf(number uint32) *nft.Set { return t.ownSet(ownName(affinityPrefix, number)) }
func (t *table) clientsOf(number uint32) *nft.Set  { return t.ownSet(ownName(clientsPrefix, number)) }

// remembers reports whether a pool has its sets.
func (t *table) remembers(number uint32) bool { return t.FoundSets[ownName(affinityPrefix, number)] }

// addMemory makes the sets of a pool.
func (t *table) addMemory(number uint32) {
	t.AddSet(t.affinityOf(number))
	t.AddSet(t.clientsOf(number))
	t.memories[number] = true
}

// setMemory has a pool remember its clients for a time.
func (t *table) setMemory(number uint32, lasts time.Duration) error {
	t.addMemory(number)
	m := memory{t, number, lasts}
	for _, c := range []nft.Chain{m.recall(), m.learner()} {
		if err := t.SetChain(c); err != nil {
			return err
		}
	}
	key := string(nft.Native(number))
	t.Own(number,
		nft.Entry{Set: recallers, Key: key, Data: ownName(recallPrefix, number)},
		nft.Entry{Set: learners, Key: key, Data: ownName(rememberPrefix, number)})
	return nil
}

// sweepSessions forgets all clients of pools that are gone.
func (t *table) sweepSessions(r *rows) {
	wanted := map[uint32]bool{}
	for number, id := range r.affinityPools() {
		wanted[number] = id.V6 == t.Family.V6()
	}
	for number := range t.memories {
		if !wanted[number] {
			t.Own(number)
			delete(t.memories, number)
		}
	}
	gone := map[uint32]bool{}
	for name := range t.FoundSets {
		if n, ok := ownNumber(name); ok && !wanted[n] {
			gone[n] = true
		}
	}
	for n := range gone {
		for _, prefix := range []string{recallPrefix, rememberPrefix} {
			if _, exists := t.Chains[ownName(prefix, n)]; exists {
				t.DeleteChain(ownName(prefix, n))
			}
		}
		for _, prefix := range []string{affinityPrefix, clientsPrefix} {
			if t.FoundSets[ownName(prefix, n)] {
				t.DeleteSet(ownName(prefix, n))
			}
		}
	}
}

// memory is that of a pool.
type memory struct {
	*table
	number uint32
	lasts  time.Duration
}

// spare is how much longer than a client is remembered its backend is kept, so that one who is remembered
// has one.
const spare = time.Minute

// client loads the key of both sets.
func (m memory) client() (exprs []any, next uint32) {
	return []any{m.Family.Load(m.Family.Source, 0)}, m.Family.Address.Words()
}

// remember makes the client's time begin anew, in both sets. An update keeps the data of what it finds
// (nft_rhash_update in the kernel's net/netfilter/nft_set_hash.c).
func (m memory) remember() []any {
	exprs, next := m.client()
	return append(exprs,
		m.Family.Load(m.Family.Destination, next), nft.LoadPort(next+m.Family.Address.Words()),
		&expr.Dynset{
			SrcRegKey: nft.Word(0), SrcRegData: nft.Word(next), SetName: ownName(affinityPrefix, m.number),
			Operation: unix.NFT_DYNSET_OP_UPDATE, Timeout: m.lasts + spare,
		},
		&expr.Dynset{
			SrcRegKey: nft.Word(0), SetName: ownName(clientsPrefix, m.number),
			Operation: unix.NFT_DYNSET_OP_UPDATE, Timeout: m.lasts,
		})
}

// recall sends the client to the backend that is remembered for it, if one is, past IPVS. Whether one is
// tells a set of its own, because nft cannot print a rule that writes back what a map says.
func (m memory) recall() nft.Chain {
	known, next := m.client()
	known = append(known, nft.In(ownName(clientsPrefix, m.number)))
	backend, _ := m.client()
	backend = append(append(known[:len(known):len(known)], backend...), nft.Find(ownName(affinityPrefix, m.number), next))
	backend = append(backend, nft.ResetPriority(next+m.Family.Address.Words()+1)...)
	return nft.Chain{Name: ownName(recallPrefix, m.number), Rules: []nft.Rule{
		nft.NewRule("remembered", append(known[:len(known):len(known)], m.remember()...)...),
		nft.NewRule("recall", append(backend, nft.Counter(), m.Family.TranslateTo(next))...),
	}}
}

// learner remembers the backend that IPVS chose, in place of an earlier one.
func (m memory) learner() nft.Chain {
	match, next := m.client()
	match = append(match, m.Family.Load(m.Family.Destination, next), nft.LoadPort(next+m.Family.Address.Words()),
		&expr.Dynset{
			SrcRegKey: nft.Word(0), SrcRegData: nft.Word(next), SetName: ownName(affinityPrefix, m.number),
			Operation: nft.DynsetDelete,
		})
	return nft.Chain{Name: ownName(rememberPrefix, m.number), Rules: []nft.Rule{
		nft.NewRule("", match...), nft.NewRule("", m.remember()...), nft.NewRule("", nft.ResetPriority(0)...),
	}}
}
