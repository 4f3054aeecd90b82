package nft

import (
	"errors"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/namespace"
	"fairlead.dev/fairlead/internal/nfnetlink"
)

// Ruleset is all of nf_tables in a network namespace, by a socket of its own. The kernel counts the transactions of all
// programs, and the Ruleset leaves out those of the plane. So an audit need not read a ruleset that no other program
// has changed.
//
//	plane ─ Commit ─► kernel: generation 7, 8, 9 ─ Foreign: 9 less the plane's own ─► has another program been here?
type Ruleset struct {
	*nfnetlink.Socket
	inject  func(operation string) error
	changed func() // may be nil
	own     atomic.Uint32
}

// Open opens that of the calling thread's network namespace. Inject is called before each transaction.
func Open(inject func(operation string) error) (*Ruleset, error) {
	s, err := nfnetlink.Dial()
	if err != nil {
		return nil, err
	}
	return Over(s, inject), nil
}

// Owner opens tables that are a socket's own: the kernel deletes them with it.
type Owner struct {
	Network namespace.Namespace
	Changed func() // is called after each transaction; may be nil
}

// Open opens those of both families.
func (o Owner) Open(
	name string, sets func(Family) []*Set, chains func(Family) []Chain,
) (r *Ruleset, tables []*Table, err error) {
	err = o.Network.Do(func() (err error) {
		r, err = Open(func(string) error { return nil })
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	r.changed = o.Changed
	tx := &Transaction{}
	for _, f := range Families {
		t := NewTable(Table{Family: f, Name: name, Owned: true, Sets: sets(f), Tx: tx})
		tables = append(tables, &t)
		err = errors.Join(err, t.Structure(chains(f)))
	}
	if err == nil {
		err = r.Send(tx, tx.Steps)
	}
	if err != nil {
		return nil, nil, errors.Join(err, r.Close())
	}
	return r, tables, nil
}

// Over does so by a socket that is open.
func Over(s *nfnetlink.Socket, inject func(operation string) error) *Ruleset {
	return &Ruleset{Socket: s, inject: inject}
}

// Foreign is a number that changes whenever another program has changed something. It is never 0.
func (r *Ruleset) Foreign() (uint32, error) {
	generation, err := r.Generation()
	return max(1, generation-r.own.Load()), err
}

// Commit performs the steps of a transaction, which is empty then, but for a few that the kernel refuses: the error is
// then dataplane.ErrPartial.
func (r *Ruleset) Commit(tx *Transaction) error {
	err := tx.Commit(r.Socket, func(steps []Step) error { return r.Send(tx, steps) })
	if tx.Early == nil {
		*tx = Transaction{}
	} else { // as many steps are likely to follow
		tx.Steps, tx.B = tx.Steps[:0], tx.B[:0]
	}
	return err
}

// Send performs steps of a transaction as one kernel transaction: all or none of them.
func (r *Ruleset) Send(tx *Transaction, steps []Step) error {
	if err := r.inject("nf_tables commit"); err != nil {
		return err
	}
	err := tx.Send(r.Socket, steps)
	if err == nil {
		r.Count()
	}
	return err
}

// Count counts a transaction of the plane that was made by another socket.
func (r *Ruleset) Count() {
	if r.own.Add(1); r.changed != nil {
		r.changed()
	}
}

// Retry commits what steps appends to a transaction. Elements that packets have added go by themselves and come again:
// while the kernel says that one is missing, or there already, steps is asked anew.
func (r *Ruleset) Retry(tx *Transaction, steps func() error) (err error) {
	const tries = 6
	for range tries {
		*tx = Transaction{}
		if err = steps(); err == nil {
			err = r.Commit(tx)
		}
		if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EEXIST) {
			break
		}
	}
	return err
}
