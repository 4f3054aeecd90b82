package iptables

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"maps"
	"math/bits"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/xtables"
)

// legacy is the back end x_tables: tables that are read and replaced as a whole.
type legacy struct {
	fault   func(string) error
	log     *slog.Logger
	sockets [2]xtables.Socket // of both families
	lock    *os.File
	sets    setIndexes
	mu      sync.Mutex        // for load, which is called for both families side by side
	tables  map[tableID]*blob // as last read or written

	glances int // without a closer look
}

func openLegacy(fault func(string) error, log *slog.Logger) (*legacy, error) {
	if bits.UintSize != 64 {
		return nil, fmt.Errorf("%w: back end legacy on a machine of 32 bits; use nf_tables", dataplane.ErrUnsupported)
	}
	l := &legacy{fault: fault, log: log, tables: map[tableID]*blob{}}
	var errs [2]error
	for i, v6 := range []bool{false, true} {
		if l.sockets[i], errs[i] = xtables.Open(v6); errors.Is(errs[i], unix.EAFNOSUPPORT) {
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
	l.lock, err = xtables.Lock(ctx, l.log)
	return err
}

// end gives the lock back.
func (l *legacy) end() {
	_ = l.lock.Close()
	l.lock = nil
}

func (l *legacy) socket(id tableID) xtables.Socket {
	if id.v6 {
		return l.sockets[1]
	}
	return l.sockets[0]
}

// load implements backend.
func (l *legacy) load(id tableID) (*content, error) {
	b, err := l.read(id)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	l.tables[id] = b
	l.mu.Unlock()
	return b.content(), nil
}

func (l *legacy) read(id tableID) (*blob, error) {
	info, raw, err := l.socket(id).Read(id.name)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", id, err)
	}
	b, err := parseBlob(id, info, raw)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", id, err)
	}
	return b, nil
}

func (l *legacy) settled() error   { return nil }
func (l *legacy) probe(bool) error { return nil } // there is no way to try

const (
	// maxGlances is after how many of them nobody relies on a glance: all rules are made again, and compared. Of 10,000
	// Services this takes most of a second.
	maxGlances = 600
	// closeSize is of how many bytes each look reads all. Of a larger table only some do, as many times fewer: the others
	// do not see when somebody puts a rule in the place of one of ours that is as long.
	closeSize = 128 << 10
	// firstSize is the same for the rules up to the last one of others: for these, too, the kernel adds up the counters of
	// all.
	firstSize = 32 * closeSize
)

// look is how much of a table is compared.
type look int

const (
	bySize   look = iota
	byOthers      // rules, up to the last one of others, who come first in what we write
	byAll
)

// undisturbed implements backend.
func (l *legacy) undisturbed(tables []tableID) (bool, error) {
	if l.glances++; l.glances >= maxGlances {
		l.glances = 0
		return false, nil
	}
	for _, id := range tables {
		same, err := l.same(id, l.look(id))
		if !same || err != nil {
			return false, err
		}
	}
	return true, nil
}

// asLoaded implements backend.
func (l *legacy) asLoaded(tables []tableID) (bool, error) {
	for _, id := range tables {
		if same, err := l.same(id, byAll); !same || err != nil {
			return false, err
		}
	}
	return true, nil
}

// look is how closely it is time to look at a table.
func (l *legacy) look(id tableID) look {
	size := 0
	if b := l.tables[id]; b != nil {
		size = int(b.Size)
	}
	switch {
	case l.glances%(1+size/closeSize) == 0:
		return byAll
	case l.glances%(1+size/firstSize) == 0:
		return byOthers
	}
	return bySize
}

// same reports whether a table is as last read or written.
func (l *legacy) same(id tableID, how look) (same bool, err error) {
	b := l.tables[id]
	info, err := l.socket(id).Info(id.name)
	if err != nil {
		return false, fmt.Errorf("%s: %w", id, err)
	}
	if b == nil || info != b.Info {
		return false, nil
	}
	end := b.foreign
	switch how {
	case bySize:
		return true, nil
	case byAll:
		end = len(b.raw) - xtables.Header
	}
	err = l.socket(id).Peek(id.name, info.Size, end, func(entries []byte) { same = b.sameUpTo(end, entries) })
	return same, err
}

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

func (l *legacy) writeTable(c *change) error {
	same, err := l.same(c.table, byOthers)
	if err != nil {
		return err
	}
	if !same {
		b, err := l.read(c.table)
		if err != nil {
			return err
		}
		l.tables[c.table] = b
	}
	if err := l.fault("x_tables replace"); err != nil {
		return err
	}
	b := l.tables[c.table]
	number := b.Number
	delete(l.tables, c.table) // until the kernel has taken what becomes of it
	next, err := b.after(c, l.sets)
	if err != nil {
		return err
	}
	if err := l.replace(next, number); err != nil {
		return err
	}
	l.tables[c.table] = next
	return nil
}

// replace puts a table in the place of one with so many rules. What the old rules had counted is added to the
// counters of those rules of others that stay.
func (l *legacy) replace(next *blob, number uint32) error {
	counters, err := l.socket(next.id).Replace(next.id.name, number, next.Info, next.raw)
	if err != nil {
		return judged(fmt.Sprintf("%s with %d rules", next.id, next.Number), err)
	}
	err = l.socket(next.id).AddCounters(next.id.name, next.Number, maps.All(next.kept), counters)
	if err != nil {
		return fmt.Errorf("%s: %w", next.id, err)
	}
	return nil
}

func (l *legacy) mark(id tableID, r *rule) uint64 {
	e := &entryEncoder{v6: id.v6, sets: l.sets}
	e.rule(r)
	return hashEntry(xtables.LayoutOf(id.v6), e.b, r.do.chainName())
}

func (t target) chainName() string {
	if t.verb == jump || t.verb == goTo {
		return t.name
	}
	return ""
}

// hashEntry is a number for what a rule says, without what the kernel writes into it.
func hashEntry(layout xtables.Layout, entry []byte, to string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write(entry[:layout.Condition])
	_, _ = h.Write(entry[layout.Offsets : layout.Offsets+4])
	rest := entry[layout.Size:]
	if to != "" { // the verdict is an offset
		rest = entry[layout.Size : len(entry)-8]
	}
	_, _ = h.Write(rest)
	_, _ = h.Write([]byte(to))
	return h.Sum64()
}
