package userspace

import (
	"encoding/binary"
	"net/netip"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// tableName is the name of our table in each family. We own what is in it, and nothing else.
const tableName = "fairlead-userspace"

// priority of the chains: after connection tracking (-200), before anybody translates addresses (-100).
const priority = -150

// The sets of a table, by their numbers, after those that all planes have. Those of scope Internal follow those of
// scope Any.
const (
	frontends = nft.NumCommon + iota // destinations of all rows
	internalFrontends
	limited // of rows that allow some sources only
	internalLimited
	refused // of rows with that verdict
	internalRefused
	dropped
	internalDropped
	clients // what pools remember, for the process that comes next
	sourceAddresses
	away // protocols, while there is no process
)

func sets(f nft.Family) []*nft.Set {
	all, destination := f.CommonSets(), f.FrontendKey()
	for _, name := range []string{"frontends", "limited", "refused", "dropped"} {
		all = append(all, &nft.Set{Name: name, Key: destination}, &nft.Set{Name: "internal-" + name, Key: destination})
	}
	return append(all,
		&nft.Set{
			Name: "clients", Flags: unix.NFT_SET_MAP | unix.NFT_SET_TIMEOUT,
			Key: []nft.Field{f.Address, nft.Index, nft.Index}, Data: []nft.Field{f.Address, nft.Port},
		},
		&nft.Set{Name: "source-nat", Flags: unix.NFT_SET_MAP, Key: destination, Data: []nft.Field{f.Address}},
		&nft.Set{Name: "away", Key: []nft.Field{nft.Protocol}},
	)
}

// origin is where a packet comes from, as far as rows care.
type origin int

const (
	elsewhere origin = iota
	fromPod
	fromNode
	numOrigins
)

func (o origin) String() string { return [...]string{"elsewhere", "pods", "node"}[o] }

// ports are those on which the process listens, by origin: the one that accepts a connection tells where it is from.
type ports [numOrigins]uint16

// listening are the ports of the process for one family: those to which TPROXY leads, on loopback, and those to which
// packets are redirected, of the own address.
type listening struct {
	ports, redirectPorts ports
	redirectAll          bool // nothing goes by TPROXY
}

// table is our table of one family.
type table struct {
	nft.Table
	made bool // by sync: the kernel had none, or another one
	listening
	phase phase
}

func newTable(f nft.Family, mark uint32, l listening, tx *nft.Transaction) *table {
	made := nft.NewTable(nft.Table{Family: f, Name: tableName, Mark: mark, Sets: sets(f), Tx: tx})
	return &table{Table: made, listening: l}
}

// load reads what the kernel holds in the table.
func (t *table) load(c *nfnetlink.Socket) error {
	if err := t.Load(c, t.chains()); err != nil || !t.Exists || t.Foreign {
		return err
	}
	for i, s := range t.Sets {
		if !t.FoundSets[s.Name] || i == clients || i == sourceAddresses { // these belong to connections
			continue
		}
		if err := t.Find(c, i); err != nil {
			return err
		}
	}
	return nil
}

// sync makes the steps from what load has found to s.
func (t *table) sync(s *model.State) error {
	t.made = !t.Exists
	t.PodInterfaces = s.Pods.Interfaces
	if err := t.Structure(t.chains()); err != nil {
		return err
	}
	t.SweepChains(nil)
	t.SweepRanges(s)
	t.setRows(s, s.Whole())
	t.Sweep()
	return nil
}

// apply makes the steps of a change.
func (t *table) apply(s *model.State, c model.Change) error {
	t.setRows(s, c)
	if c.Pods == nil {
		return nil
	}
	return t.Structure(t.chains())
}

func (t *table) setRows(s *model.State, c model.Change) {
	for key, f := range c.Frontends.Set.All() {
		if t.Family.Mine(key.Addr) {
			t.Own(key, elementsOf(key, f)...)
		}
	}
	for _, key := range c.Frontends.Delete {
		t.Own(key)
	}
	t.OwnGuards(s, c.Guards.Keys())
	if c.Pods != nil {
		t.OwnPods(s.Pods)
	}
}

// elementsOf are those of a frontend, the one that leads to the others last.
func elementsOf(key model.Key, f model.Frontend) []nft.Entry {
	at := func(set int) nft.Entry { return nft.Entry{Set: set + int(key.Scope), Key: string(nft.EncodeKey(key))} }
	all := nft.SourcesOf(key, f)
	if f.Allow != nil {
		all = append(all, at(limited))
	}
	switch f.Verdict {
	case model.Reject:
		all = append(all, at(refused))
	case model.Drop:
		all = append(all, at(dropped))
	}
	return append(all, at(frontends))
}

// loopback is the address on which the process listens: it cannot be reached from elsewhere.
func (t *table) loopback() netip.Addr {
	if t.Family.V6() {
		return netip.IPv6Loopback()
	}
	return netip.AddrFrom4([4]byte{127, 0, 0, 1})
}

func bigEndian(p uint16) []byte { return binary.BigEndian.AppendUint16(nil, p) }

// isTransparent goes on with the rule if the packet belongs to a socket of a process like ours. (At output that is
// the socket which sends it.)
func isTransparent() []any {
	return []any{&expr.Socket{Key: expr.SocketKeyTransparent, Register: nft.Word(0)}, nft.Equals([]byte{1})}
}
