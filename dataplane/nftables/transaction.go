package nftables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
)

// A step is one thing to do to the kernel: one element to add to or delete from a set, or the
// attributes of any other nf_tables message.
type step struct {
	verb     uint16 // NFT_MSG_*
	flags    uint16
	table    *table
	set      *set // elements only
	from, to int  // its attributes in transaction.data
	joined   bool // the next step must be in the same kernel transaction
}

func (s *step) element() bool { return s.set != nil }

// transaction gathers steps in the order in which the kernel shall perform them. Any prefix of it
// that does not end in a joined step leaves the kernel in a state in which packets find their way:
// what rows refer to is added before them and deleted after them.
type transaction struct {
	encoder
	steps []step
	// whole: all steps or none, because the first one takes the old table away.
	whole bool
}

func (t *transaction) begin(verb, flags uint16, table *table) {
	t.steps, t.b = double(t.steps, 1), double(t.b, maxStep)
	t.steps = append(t.steps, step{verb: verb, flags: flags, table: table, from: len(t.b)})
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

func (t *transaction) end() { t.steps[len(t.steps)-1].to = len(t.b) }

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
	for steps := t.steps; len(steps) > 0; {
		n := t.chunk(steps, p.conn.chunk)
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

// send performs steps as one kernel transaction (see nfnetlink_rcv_batch in the kernel's
// net/netfilter/nfnetlink.c): all or none of them.
func (p *Plane) send(t *transaction, steps []step) error {
	if err := p.fault("nftables commit"); err != nil {
		return err
	}
	first, last := p.conn.encode(t, steps, true)
	if err := p.conn.send(); err != nil {
		return err
	}
	err := p.conn.verdict(first, last, t, steps)
	if err == nil {
		p.own++
	}
	return err
}

// encode builds the batch and returns the sequence numbers of its begin and of its last message,
// the only one that the kernel is asked to acknowledge. A batch that does not end is checked by the
// kernel and then forgotten.
func (c *conn) encode(t *transaction, steps []step, end bool) (first, last uint32) {
	c.drain()
	c.buf = c.buf[:0]
	c.end(c.message(unix.NFNL_MSG_BATCH_BEGIN, 0, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES))
	first = c.seq
	var start int
	for i := 0; i < len(steps); {
		s := &steps[i]
		start = c.message(unix.NFNL_SUBSYS_NFTABLES<<8|s.verb, s.flags, s.table.family.number, 0)
		if !s.element() {
			c.buf = append(c.buf, t.b[s.from:s.to]...)
			i++
		} else {
			i += c.elements(t, steps[i:])
		}
		c.end(start)
	}
	binary.NativeEndian.PutUint16(c.buf[start+6:],
		binary.NativeEndian.Uint16(c.buf[start+6:])|unix.NLM_F_ACK)
	last = c.seq
	if end {
		c.end(c.message(unix.NFNL_MSG_BATCH_END, 0, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES))
	}
	return first, last
}

// elements appends the attributes of one message for as many of the steps as belong in it, and
// returns how many.
func (c *conn) elements(t *transaction, steps []step) (n int) {
	e := encoder{c.buf}
	e.string(unix.NFTA_SET_ELEM_LIST_TABLE, steps[0].table.name)
	e.string(unix.NFTA_SET_ELEM_LIST_SET, steps[0].set.name)
	list := e.open(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
	for n < len(steps) && steps[n].verb == steps[0].verb && steps[n].set == steps[0].set &&
		len(e.b)-list+steps[n].to-steps[n].from <= maxAttribute {
		e.b = append(e.b, t.b[steps[n].from:steps[n].to]...)
		n++
	}
	e.close(list)
	c.buf = e.b
	return n
}

// verdict reads the kernel's answers to a batch. An error for the batch's begin stands for all.
func (c *conn) verdict(first, last uint32, t *transaction, steps []step) error {
	var err error
	for done := false; !done; {
		readErr := c.read(func(h unix.NlMsghdr, body []byte) {
			if h.Type != unix.NLMSG_ERROR || h.Seq < first || h.Seq > last {
				return
			}
			done = done || h.Seq == last || h.Seq == first
			if e := errno(body); e != 0 && err == nil {
				err = &refusal{step: t.describe(steps, h.Seq-first), err: e}
			}
		})
		if readErr != nil {
			return readErr
		}
	}
	return err
}

// describe says in words what the n-th message of a batch was about; 0 is its begin.
func (t *transaction) describe(steps []step, n uint32) string {
	i := 0
	for c := (&conn{}); n > 1 && i < len(steps); n-- {
		if steps[i].element() {
			i += c.elements(t, steps[i:])
			c.buf = c.buf[:0]
		} else {
			i++
		}
	}
	if n == 0 || i >= len(steps) {
		return "the transaction"
	}
	s := &steps[i]
	if !s.element() {
		return fmt.Sprintf("%s %s", verbs[s.verb], s.table.describe(s.verb, t.b[s.from:s.to]))
	}
	others := (&conn{}).elements(t, steps[i:]) - 1
	text := fmt.Sprintf("%s %s", verbs[s.verb], s.table.describeElement(s.set, t.b[s.from:s.to]))
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
