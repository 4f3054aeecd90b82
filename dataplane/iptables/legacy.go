package iptables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"net/netip"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/xt"
)

// legacy is the back end x_tables: tables that are read and replaced as a whole.
//
//	load ─► xt.Table, kept ─► write: do others' rules differ from those in it? ─ yes ─► read again
//	                                   └─ no ─► Apply to the kept copy ─► replace ─► add the counters back
//
// The lock, which begin takes, keeps well-behaved programs away between reading and replacing. The copy is kept because
// to read a large table costs more than to replace it: the kernel adds up the counters of all processors.
type legacy struct {
	fault   func(string) error
	log     *slog.Logger
	sockets [2]xt.Socket // of both families
	lock    *os.File
	sets    setIndexes
	mu      sync.Mutex            // for load, which is called for both families side by side
	tables  map[tableID]*xt.Table // as last read or written

	quickLooks int // without a closer look
}

func openLegacy(fault func(string) error, log *slog.Logger) (*legacy, error) {
	if bits.UintSize != 64 {
		return nil, fmt.Errorf("%w: back end legacy on a machine of 32 bits; use nf_tables", dataplane.ErrUnsupported)
	}
	l := &legacy{fault: fault, log: log, tables: map[tableID]*xt.Table{}}
	var errs [2]error
	for i, v6 := range []bool{false, true} {
		if l.sockets[i], errs[i] = xt.Open(v6); errors.Is(errs[i], unix.EAFNOSUPPORT) {
			errs[i] = nil // load will say so
		}
	}
	if err := errors.Join(errs[:]...); err != nil {
		return nil, errors.Join(fmt.Errorf("open socket: %w", err), l.close())
	}
	return l, nil
}

func (l *legacy) close() error { return errors.Join(l.sockets[0].Close(), l.sockets[1].Close()) }

func (l *legacy) use(sets setIndexes) { l.sets = sets }
func (l *legacy) tidy(tableID) error  { return nil }

// begin waits for the lock.
func (l *legacy) begin(ctx context.Context) (err error) {
	l.lock, err = xt.Lock(ctx, l.log)
	return err
}

// end gives the lock back.
func (l *legacy) end() {
	_ = l.lock.Close()
	l.lock = nil
}

func (l *legacy) socket(id tableID) xt.Socket {
	if id.v6 {
		return l.sockets[1]
	}
	return l.sockets[0]
}

// load implements backend.
func (l *legacy) load(id tableID) (*content, error) {
	t, err := l.read(id)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	l.tables[id] = t
	l.mu.Unlock()
	return contentOf(t), nil
}

func (l *legacy) read(id tableID) (*xt.Table, error) {
	t, err := l.socket(id).Read(id.name, owned)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", id, err)
	}
	return t, nil
}

// counts implements backend. The kernel hands out a table as a whole.
func (l *legacy) counts(id tableID, chains []string, f func(string, netip.AddrPort, uint64)) error {
	t, err := l.read(id)
	if err != nil {
		return err
	}
	wanted := map[string]bool{}
	for _, name := range chains {
		wanted[name] = true
	}
	for _, c := range t.Chains {
		if !wanted[c.Name] {
			continue
		}
		for e := range t.Entries(c) {
			if name, info := t.TargetName(e.Bytes); t.Counted(e.Bytes) > 0 {
				f(c.Name, backendOf(name, info, id.v6), t.Counted(e.Bytes))
			}
		}
	}
	return nil
}

func contentOf(t *xt.Table) *content {
	c := &content{chains: map[string][]uint64{}}
	for _, s := range t.Chains {
		var marks []uint64
		for e := range t.Entries(s) {
			switch {
			case s.Own:
				marks = append(marks, t.Hash(e.Bytes, e.To))
			case owned(e.To):
				c.base = append(c.base, foundRule{
					chain: s.Name, id: uint64(e.At), mark: t.Hash(e.Bytes, e.To), to: e.To, entry: s.Base && e.To != chainMark,
				})
			}
		}
		if s.Own {
			c.chains[s.Name] = marks[1 : len(marks)-1] // not the head, and not the return
		}
	}
	return c
}

func (l *legacy) present(v6 bool) ([]string, error) { return l.socket(tableID{v6: v6}).Present() }

func (l *legacy) settled() {}
func (l *legacy) Count()   {}

// probe implements backend. There is no way to try rules.
func (l *legacy) probe(v6 bool) (err error) {
	for _, id := range tablesOf(v6) {
		_, failed := l.load(id)
		err = cmp.Or(err, failed)
	}
	return err
}

const (
	// maxGlances is after how many quick audits all rules are made again, and compared. Of 10,000 Services this takes
	// most of a second.
	maxQuickLooks = 600
	// closeSize is of how many bytes each quick audit reads all. Of a larger table only some do, as many times fewer.
	// The others do not see that another program has replaced one of our rules by one of the same length.
	closeSize = 128 << 10
	// firstSize is the same for the rules up to the last one of others: for these, too, the kernel adds up the counters
	// of all.
	firstSize = 32 * closeSize
)

// undisturbed implements backend.
func (l *legacy) undisturbed(tables []tableID) (bool, error) {
	if l.quickLooks++; l.quickLooks >= maxQuickLooks {
		l.quickLooks = 0
		return false, nil
	}
	for _, id := range tables {
		same, err := l.same(id, l.quickLook)
		if !same || err != nil {
			return false, err
		}
	}
	return true, nil
}

// asLoaded implements backend.
func (l *legacy) asLoaded(tables []tableID) (bool, error) {
	for _, id := range tables {
		if same, err := l.same(id, wholeTable); !same || err != nil {
			return false, err
		}
	}
	return true, nil
}

// This is how much of a table one quick audit compares.
//
// The kernel adds up the counters of all processors for each entry that it hands out, which of a large table takes
// longer than all else that Audit does. But its number of entries and its size cost nothing, and the rules of others
// come first in what we write. So Audit, which comes every second, compares:
//
//	table            number and size    rules of others    all rules
//	below 128 KiB    each time          each time          each time
//	1 MiB            each time          each time          every 9th time
//	8 MiB            each time          every 3rd time     every 65th time
func (l *legacy) quickLook(t *xt.Table) int {
	switch size := int(t.Size); {
	case l.quickLooks%(1+size/closeSize) == 0:
		return wholeTable(t)
	case l.quickLooks%(1+size/firstSize) == 0:
		return upToForeign(t)
	}
	return 0
}

// same reports whether a table is as last read or written.
func (l *legacy) same(id tableID, end func(*xt.Table) int) (bool, error) {
	t := l.tables[id]
	if t == nil {
		return false, nil
	}
	same, err := l.socket(id).Same(t, end(t))
	if err != nil {
		return false, fmt.Errorf("%s: %w", id, err)
	}
	return same, nil
}

func upToForeign(t *xt.Table) int { return t.Foreign } // they come first in what we write
func wholeTable(t *xt.Table) int  { return int(t.Info.Size) }

// write implements backend, table by table. Each is replaced at once for packets. Connections are forwarded
// before others are no longer refused.
func (l *legacy) write(changes []*change) error {
	for _, c := range changes {
		if c.empty() {
			continue
		}
		if err := l.writeTable(c); err != nil {
			return err
		}
	}
	return nil
}

// writeTable changes a table. It reads the table first, unless the rules of others in it are as they were. The copy
// counts only once the kernel has taken the change.
func (l *legacy) writeTable(c *change) error {
	same, err := l.same(c.table, upToForeign)
	if err != nil {
		return err
	}
	if !same { // then ours may not be as they were either: the next audit looks
		l.quickLooks = maxQuickLooks
		if l.tables[c.table], err = l.read(c.table); err != nil {
			return err
		}
	}
	if err := l.fault("x_tables replace"); err != nil {
		return err
	}
	t := l.tables[c.table]
	delete(l.tables, c.table) // until the kernel has taken what becomes of it
	if err := t.Apply(l.encode(c)); err != nil {
		return applied(err)
	}
	if err := l.replace(c.table, t); err != nil {
		return err
	}
	l.tables[c.table] = t
	return nil
}

func applied(err error) error {
	var missing *xt.MissingChain
	if errors.As(err, &missing) {
		return &refusedError{"a rule of chain " + missing.Chain, fmt.Errorf("no chain %s", missing.To)}
	}
	return err
}

// replace puts a table in the place of the kernel's.
func (l *legacy) replace(id tableID, t *xt.Table) error {
	counters, err := l.socket(id).Replace(t)
	if err != nil {
		return judged(fmt.Sprintf("%s with %d rules", id, t.Number), err)
	}
	if err = l.socket(id).AddCounters(t, counters); err != nil {
		return fmt.Errorf("%s: %w", id, err)
	}
	return nil
}

func (l *legacy) mark(id tableID, r *rule) uint64 {
	e := &xt.Rules{Layout: xt.LayoutOf(id.v6)}
	r.encode(e, l.sets)
	return e.Hash(e.B, r.do.chainName())
}

func (t target) chainName() string {
	if t.verb == jump || t.verb == goTo {
		return t.name
	}
	return ""
}

// encode is a change in the form of x_tables.
func (l *legacy) encode(c *change) *xt.Change {
	layout := xt.LayoutOf(c.table.v6)
	x := &xt.Change{Set: map[string]*xt.Rules{}, Gone: c.gone, Add: map[string]*xt.Rules{}}
	for name, rules := range c.set {
		e := xt.NewChain(layout, name)
		for i := range rules {
			rules[i].encode(e, l.sets)
		}
		x.Set[name] = e
	}
	for _, a := range slices.Backward(c.add) {
		if x.Add[a.chain] == nil {
			x.Add[a.chain] = &xt.Rules{Layout: layout}
		}
		a.rule.encode(x.Add[a.chain], l.sets)
	}
	for _, f := range c.remove {
		x.Remove = append(x.Remove, xt.Place{Chain: f.chain, At: int(f.id)})
	}
	return x
}
