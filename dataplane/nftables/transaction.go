package nftables

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/nfnetlink"
)

// A step is one thing to do to the kernel: one element to add to or delete from a set, or the
// attributes of any other nf_tables message.
type step struct {
	verb     uint16 // NFT_MSG_*
	flags    uint16
	table    *table
	set      *set // elements only
	from, to int  // its attributes in the transaction's bytes
	joined   bool // the next step must be in the same kernel transaction
}

func (s *step) element() bool { return s.set != nil }

// transaction gathers steps in the order in which the kernel shall perform them. Any prefix of it
// that does not end in a joined step leaves the kernel in a state in which packets find their way:
// what rows refer to is added before them and deleted after them.
type transaction struct {
	nfnetlink.Encoder
	steps []step
	// whole: all steps or none, because the first one takes the old table away.
	whole bool
}

func (t *transaction) begin(verb, flags uint16, table *table) {
	t.steps, t.B = double(t.steps, 1), double(t.B, maxStep)
	t.steps = append(t.steps, step{verb: verb, flags: flags, table: table, from: len(t.B)})
}

// maxStep is about what the attributes of one step take.
const maxStep = 256

// double makes room for n more elements or, if there is none, for as many again. (Where append makes
// room it is for a quarter of them: long slices leave four times what they hold as garbage.)
func double[T any](s []T, n int) []T {
	if cap(s)-len(s) >= n {
		return s
	}
	return slices.Grow(s, len(s)+n)
}

func (t *transaction) end() { t.steps[len(t.steps)-1].to = len(t.B) }

// join ties the last step to the one that follows.
func (t *transaction) join() { t.steps[len(t.steps)-1].joined = true }

const (
	// chunkSize bounds one kernel transaction, and with it how long the ruleset's lock is held.
	chunkSize = 512 << 10
	// maxAttribute is the most that one list of elements may hold: its length is a uint16.
	maxAttribute = 1<<16 - 512
	// maxRefusals is after how many refused steps those of a refused transaction are not tried apart.
	maxRefusals = 16
)

// commit performs the steps in as few kernel transactions as their size allows. The error is
// dataplane.ErrPartial if all but a few steps, which the kernel refuses, have been done.
func (p *Plane) commit(t *transaction) error {
	if t.whole {
		return p.send(t, t.steps)
	}
	var errs []error
	size := min(chunkSize, p.conn.Room/2) // the other half is more than the headers of messages need
	for steps := t.steps; len(steps) > 0; {
		n := t.chunk(steps, size)
		p.isolate(t, steps[:n], &errs)
		steps = steps[n:]
	}
	err := errors.Join(errs...)
	if err == nil || len(errs) >= maxRefusals || slices.ContainsFunc(errs, func(e error) bool { return !refused(e) }) {
		return err
	}
	return fmt.Errorf("%w: %w", dataplane.ErrPartial, err)
}

// chunk is how many of the steps make up the next kernel transaction.
func (t *transaction) chunk(steps []step, size int) int {
	for n := range steps {
		if steps[n].to-steps[0].from > size && n > 0 && !steps[n-1].joined {
			return n
		}
	}
	return len(steps)
}

// isolate performs steps in one kernel transaction or, if the kernel refuses it, in ever smaller
// ones, so that a row which the kernel does not take does not keep the others out.
func (p *Plane) isolate(t *transaction, steps []step, errs *[]error) {
	err := p.send(t, steps)
	if err == nil {
		return
	}
	half := middle(steps)
	if half == 0 || !refused(err) || len(*errs) >= maxRefusals {
		*errs = append(*errs, err)
		return
	}
	p.isolate(t, steps[:half], errs)
	p.isolate(t, steps[half:], errs)
}

// middle is where steps can be parted, as near to their middle as the joined ones allow; 0: nowhere.
func middle(steps []step) int {
	half := len(steps) / 2
	for before, after := half, half; before > 0 || after < len(steps); before, after = before-1, after+1 {
		if before > 0 && !steps[before-1].joined {
			return before
		}
		if after > 0 && after < len(steps) && !steps[after-1].joined {
			return after
		}
	}
	return 0
}

// refused reports whether an error is about what was sent, not about the connection, our rights, or a
// ruleset that is not what we take it for.
func refused(err error) bool {
	var r *refusal
	return errors.As(err, &r) && !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.ENOENT)
}

// refusal is the kernel's answer to a step.
type refusal struct {
	step string
	err  error
}

func (r *refusal) Error() string { return fmt.Sprintf("nf_tables refuses %s: %v", r.step, r.err) }
func (r *refusal) Unwrap() error { return r.err }

// send performs steps as one kernel transaction: all or none of them.
func (p *Plane) send(t *transaction, steps []step) error {
	if err := p.fault("nftables commit"); err != nil {
		return err
	}
	t.encode(p.conn.Begin(), steps)
	err := t.explain(p.conn.Commit(), steps)
	if err == nil {
		p.own++
	}
	return err
}

func (t *transaction) encode(e *nfnetlink.Encoder, steps []step) {
	for i := 0; i < len(steps); {
		s := &steps[i]
		start := e.Message(nfnetlink.NFTables|s.verb, s.flags, s.table.family.number)
		if !s.element() {
			e.B = append(e.B, t.B[s.from:s.to]...)
			i++
		} else {
			i += t.elements(e, steps[i:])
		}
		e.Finish(start)
	}
}

// elements appends the attributes of one message for as many of the steps as belong in it, and
// returns how many.
func (t *transaction) elements(e *nfnetlink.Encoder, steps []step) (n int) {
	e.Text(unix.NFTA_SET_ELEM_LIST_TABLE, steps[0].table.name)
	e.Text(unix.NFTA_SET_ELEM_LIST_SET, steps[0].set.name)
	list := e.Open(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
	for n < len(steps) && steps[n].verb == steps[0].verb && steps[n].set == steps[0].set &&
		len(e.B)-list+steps[n].to-steps[n].from <= maxAttribute {
		e.B = append(e.B, t.B[steps[n].from:steps[n].to]...)
		n++
	}
	e.Close(list)
	return n
}

// explain says which step was refused, if one was.
func (t *transaction) explain(err error, steps []step) error {
	var r *nfnetlink.Refusal
	if errors.As(err, &r) {
		return &refusal{step: t.describe(steps, r.Message), err: r.Err}
	}
	return err
}

// describe says in words what the n-th message of a batch was about; -1 is all of it.
func (t *transaction) describe(steps []step, n int) string {
	i := 0
	for ; n > 0 && i < len(steps); n-- {
		if steps[i].element() {
			i += t.elements(&nfnetlink.Encoder{}, steps[i:])
		} else {
			i++
		}
	}
	if n < 0 || i >= len(steps) {
		return "the transaction"
	}
	s := &steps[i]
	if !s.element() {
		return fmt.Sprintf("%s %s", verbs[s.verb], s.table.describe(s.verb, t.B[s.from:s.to]))
	}
	others := t.elements(&nfnetlink.Encoder{}, steps[i:]) - 1
	text := fmt.Sprintf("%s %s", verbs[s.verb], s.table.describeElement(s.set, t.B[s.from:s.to]))
	if others > 0 {
		text += fmt.Sprintf(" or one of the %d after it", others)
	}
	return text
}

var verbs = map[uint16]string{
	unix.NFT_MSG_NEWTABLE: "adding", unix.NFT_MSG_DELTABLE: "deleting",
	unix.NFT_MSG_NEWSET: "adding", unix.NFT_MSG_DELSET: "deleting",
	unix.NFT_MSG_NEWCHAIN: "adding", unix.NFT_MSG_DELCHAIN: "deleting",
	unix.NFT_MSG_NEWRULE: "adding", unix.NFT_MSG_DELRULE: "deleting",
	unix.NFT_MSG_NEWSETELEM: "adding", unix.NFT_MSG_DELSETELEM: "deleting",
}
