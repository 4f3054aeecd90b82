package userspace

import (
	"encoding/binary"
	"net/netip"
	"slices"

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

// The sets of a table, by index. Those of scope Internal follow those of scope Any.
const (
	frontends = iota // destinations of all rows
	internalFrontends
	limited // of rows that allow some sources only
	internalLimited
	sources // these
	internalSources
	refused // of rows with that verdict
	internalRefused
	dropped
	internalDropped
	pods
	rejectAddresses
	dropAddresses
	rejectRanges
	dropRanges
	clients // what pools remember, for whoever comes next
	disguises
	away // protocols, while there is no process
)

func sets(f nft.Family) []*nft.Set {
	key, address := f.FrontendKey(), []nft.Field{f.Address}
	hash := func(name string, key []nft.Field) *nft.Set { return &nft.Set{Name: name, Key: key} }
	ranges := func(name string) *nft.Set {
		return &nft.Set{Name: name, Flags: unix.NFT_SET_INTERVAL, Key: address}
	}
	from := func(name string) *nft.Set {
		return &nft.Set{Name: name, Flags: unix.NFT_SET_INTERVAL, Key: append(f.FrontendKey(), f.Address)}
	}
	return []*nft.Set{
		frontends:         hash("frontends", key),
		internalFrontends: hash("internal-frontends", key),
		limited:           hash("limited", key),
		internalLimited:   hash("internal-limited", key),
		sources:           from("sources"),
		internalSources:   from("internal-sources"),
		refused:           hash("refused", key),
		internalRefused:   hash("internal-refused", key),
		dropped:           hash("dropped", key),
		internalDropped:   hash("internal-dropped", key),
		pods:              ranges("pods"),
		rejectAddresses:   hash("reject-addresses", address),
		dropAddresses:     hash("drop-addresses", address),
		rejectRanges:      ranges("reject-ranges"),
		dropRanges:        ranges("drop-ranges"),
		clients: {
			Name: "clients", Flags: unix.NFT_SET_MAP | unix.NFT_SET_TIMEOUT,
			Key: []nft.Field{f.Address, nft.Index, nft.Index}, Data: []nft.Field{f.Address, nft.Port},
		},
		disguises: {Name: "disguises", Flags: unix.NFT_SET_MAP, Key: key, Data: address},
		away:      hash("away", []nft.Field{nft.Protocol}),
	}
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
	withoutFIB           bool // the kernel has no nft_fib
}

// table is our table of one family.
type table struct {
	nft.Table
	made bool // by sync: the kernel had none, or another one
	listening
	phase  phase
	owners map[any][]element
	found  map[element]bool // in the kernel, and nobody has claimed it yet
}

// element is a member of a set, by the key that nft.Table.Element takes.
type element struct {
	set int
	key string
}

func newTable(f nft.Family, mark uint32, l listening, tx *nft.Transaction) *table {
	return &table{
		Table: nft.Table{
			Family: f, Name: tableName, Mark: mark, Sets: sets(f), Tx: tx,
			FoundSets: map[string]bool{}, Chains: map[string][]string{},
		},
		listening: l, owners: map[any][]element{}, found: map[element]bool{},
	}
}

// load reads what the kernel holds in the table.
func (t *table) load(c *nfnetlink.Socket) error {
	if err := t.Load(c, t.chains()); err != nil || !t.Exists || t.Foreign {
		return err
	}
	for i, s := range t.Sets {
		if !t.FoundSets[s.Name] || i == clients || i == disguises { // these belong to connections
			continue
		}
		reset := func() {
			for e := range t.found {
				if e.set == i {
					delete(t.found, e)
				}
			}
		}
		err := t.Members(c, i, reset, func(key string, _ nft.Element) { t.found[element{i, key}] = true })
		if err != nil {
			return err
		}
	}
	return nil
}

// sync makes the steps from what load has found to s.
func (t *table) sync(s *model.State) error {
	t.made = !t.Exists
	wanted := map[any][]element{}
	for key, f := range s.Frontends {
		if t.Family.Mine(key.Addr) {
			wanted[key] = elementsOf(key, f)
		}
	}
	for p, v := range s.Guards {
		if t.Family.Mine(p.Addr()) && p.IsSingleIP() {
			wanted[p] = addressElements(p, v)
		}
	}
	wanted[pods], wanted[rejectRanges] = t.podElements(s), t.rangeElements(s)
	surplus := t.surplus(wanted)
	t.PodInterfaces = s.Pods.Interfaces
	if err := t.Structure(t.chains()); err != nil {
		return err
	}
	t.SweepChains(nil)
	t.deleteAll(surplus, true)
	for owner, elements := range wanted {
		t.replace(owner, elements)
	}
	t.deleteAll(surplus, false)
	clear(t.found)
	return nil
}

// surplus are the elements in the kernel that nobody wants.
func (t *table) surplus(wanted map[any][]element) (out []element) {
	left := map[element]bool{}
	for e := range t.found {
		left[e] = true
	}
	for _, elements := range wanted {
		for _, e := range elements {
			delete(left, e)
		}
	}
	for e := range left {
		out = append(out, e)
	}
	return out
}

// deleteAll deletes elements of interval sets, or of the others. A range goes in the transaction that brings those
// which it must not overlap.
func (t *table) deleteAll(elements []element, intervals bool) {
	for _, e := range elements {
		if t.Sets[e.set].Interval() == intervals {
			t.Element(unix.NFT_MSG_DELSETELEM, e.set, []byte(e.key), nil)
			if intervals {
				t.Tx.Join()
			}
		}
	}
}

// apply makes the steps of a change.
func (t *table) apply(s *model.State, c model.Change) error {
	for key, f := range c.Frontends.Set.All() {
		if t.Family.Mine(key.Addr) {
			t.replace(key, elementsOf(key, f))
		}
	}
	for _, key := range c.Frontends.Delete {
		t.replace(key, nil)
	}
	ranges := false
	for p, v := range c.Guards.Set.All() {
		ranges = ranges || !p.IsSingleIP()
		if t.Family.Mine(p.Addr()) && p.IsSingleIP() {
			t.replace(p, addressElements(p, v))
		}
	}
	for _, p := range c.Guards.Delete {
		ranges = ranges || !p.IsSingleIP()
		t.replace(p, nil)
	}
	if ranges {
		t.replace(rejectRanges, t.rangeElements(s))
	}
	if c.Pods == nil {
		return nil
	}
	t.replace(pods, t.podElements(s))
	t.PodInterfaces = s.Pods.Interfaces
	return t.Structure(t.chains())
}

// replace makes the elements of an owner (a row, or all ranges) these. What goes, goes first, and all of it is one
// kernel transaction, so that no packet meets half a row.
func (t *table) replace(owner any, now []element) {
	before := t.owners[owner]
	joined := false
	step := func(verb uint16, e element) {
		if joined {
			t.Tx.Join()
		}
		t.Element(verb, e.set, []byte(e.key), nil)
		joined = true
	}
	for _, e := range before {
		if !slices.Contains(now, e) {
			step(unix.NFT_MSG_DELSETELEM, e)
		}
	}
	for _, e := range now {
		switch {
		case slices.Contains(before, e):
		case t.found[e]:
			delete(t.found, e)
		default:
			step(unix.NFT_MSG_NEWSETELEM, e)
		}
	}
	if t.owners[owner] = now; now == nil {
		delete(t.owners, owner)
	}
}

// elementsOf are those of a frontend, the one that leads to the others last.
func elementsOf(key model.Key, f model.Frontend) (out []element) {
	scope, name := int(key.Scope), string(nft.EncodeKey(key))
	if f.Allow != nil {
		for _, source := range nft.EncodeSources(key, f.Allow) {
			out = append(out, element{sources + scope, source})
		}
		out = append(out, element{limited + scope, name})
	}
	switch f.Verdict {
	case model.Reject:
		out = append(out, element{refused + scope, name})
	case model.Drop:
		out = append(out, element{dropped + scope, name})
	}
	return append(out, element{frontends + scope, name})
}

func addressElements(p netip.Prefix, v model.Verdict) []element {
	set := rejectAddresses
	if v == model.Drop {
		set = dropAddresses
	}
	return []element{{set, string(p.Addr().AsSlice())}}
}

func (t *table) rangeElements(s *model.State) (out []element) {
	for v, spans := range nft.Flatten(s.Guards, t.Family) {
		set := rejectRanges
		if v == model.Drop {
			set = dropRanges
		}
		for _, span := range spans {
			out = append(out, element{set, span.Encode()})
		}
	}
	return out
}

func (t *table) podElements(s *model.State) (out []element) {
	for _, p := range s.Pods.Prefixes {
		if t.Family.Mine(p.Addr()) {
			out = append(out, element{pods, nft.Interval(p)})
		}
	}
	return out
}

// loopback is the address on which the process listens: nobody reaches it from elsewhere.
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
