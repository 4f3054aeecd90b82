package nft

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/model"
)

// A Step is one thing to do to the kernel: one element to add to or delete from a set, or the
// attributes of any other nf_tables message.
type Step struct {
	Verb     uint16 // NFT_MSG_*
	flags    uint16
	joined   bool // the next step must be in the same kernel transaction
	Table    *Table
	set      *Set // elements only
	from, to int  // its attributes in the transaction's bytes
}

// Transaction gathers steps in the order in which the kernel shall perform them. Rows refer to objects that are added
// before them and deleted after them. So after any prefix that does not end in a joined step packets find their way.
//
//	Steps: element  element  chain  rule │ rule  element …    │: a chunk ends; not after a joined step
//	B:     [attrs]  [attrs]  [attrs] …                        all in one buffer, at Step.from to Step.to
//	         └──────────┴─► one message: neighbours that do the same to one set share its header
//
// The steps are kept after they were sent. So a refused transaction can be sent again in parts, and an audit can say
// what each step would repair. The kernel's answer, which counts messages, can be put into words.
type Transaction struct {
	nfnetlink.Encoder
	Steps []Step
	// Early, if not nil, performs what there is whenever that is much, and empties the transaction. So the first Sync of a
	// million backends does not hold all their steps, which take more memory than the backends.
	Early func()
}

// early is how many steps are much.
const early = 1 << 15

func (t *Transaction) begin(verb, flags uint16, table *Table) *Step {
	if t.Early != nil && len(t.Steps) >= early && !t.last().joined {
		t.Early()
	}
	t.Steps, t.B = double(t.Steps, 1), double(t.B, maxStep)
	t.Steps = append(t.Steps, Step{Verb: verb, flags: flags, Table: table, from: len(t.B)})
	return t.last()
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

func (t *Transaction) last() *Step { return &t.Steps[len(t.Steps)-1] }

// End ends a step.
func (t *Transaction) End() { t.last().to = len(t.B) }

// Join ties the last step, if there is one, to the one that follows.
func (t *Transaction) Join() {
	if len(t.Steps) > 0 {
		t.last().joined = true
	}
}

// Joined reports whether the next step must be in the same kernel transaction.
func (s *Step) Joined() bool { return s.joined }

// Append adds the steps of another transaction, which is empty then.
func (t *Transaction) Append(o *Transaction) {
	offset := len(t.B)
	t.B = append(t.B, o.B...)
	for _, s := range o.Steps {
		s.from, s.to = s.from+offset, s.to+offset
		t.Steps = append(t.Steps, s)
	}
	*o = Transaction{}
}

const (
	// chunkSize bounds one kernel transaction, and with it how long the ruleset's lock is held.
	chunkSize = 512 << 10
	// maxAttribute is the most that one list of elements may hold: its length is a uint16.
	maxAttribute = 1<<16 - 512
)

// Chunks are the steps in as few kernel transactions as a size in bytes allows.
func (t *Transaction) Chunks(c *nfnetlink.Socket, size int) iter.Seq[[]Step] {
	size = min(size, c.Room/2) // the other half is more than the headers of messages need
	return func(yield func([]Step) bool) {
		for steps := t.Steps; len(steps) > 0; {
			n := chunk(steps, size)
			if !yield(steps[:n]) {
				return
			}
			steps = steps[n:]
		}
	}
}

// chunk is how many of the steps make up the next kernel transaction. A run of joined steps that is too long stays
// whole: the kernel's limits are far above chunkSize, which only keeps others from waiting for the lock.
func chunk(steps []Step, size int) int {
	for n := range steps {
		if steps[n].to-steps[0].from > size && n > 0 && !steps[n-1].joined {
			return n
		}
	}
	return len(steps)
}

// Refusal is the kernel's answer to a step.
type Refusal struct {
	Step string // in words
	Verb uint16 // of the step; 0: the transaction as a whole is refused
	err  error
}

func (r *Refusal) Error() string { return fmt.Sprintf("nf_tables refuses %s: %v", r.Step, r.err) }
func (r *Refusal) Unwrap() error { return r.err }

// Send performs steps of the transaction as one kernel transaction: all or none of them. The error is a Refusal if
// the kernel does not take one.
func (t *Transaction) Send(c *nfnetlink.Socket, steps []Step) error {
	t.encode(c.Begin(), steps)
	return t.explain(c.Commit(), steps)
}

// Check has the kernel check all steps, but not perform them.
func (t *Transaction) Check(c *nfnetlink.Socket) error {
	t.encode(c.Begin(), t.Steps)
	return t.explain(c.Check(), t.Steps)
}

func (t *Transaction) encode(e *nfnetlink.Encoder, steps []Step) {
	for i := 0; i < len(steps); {
		s := &steps[i]
		start := e.Message(nfnetlink.NFTables|s.Verb, s.flags, s.Table.Family.Number)
		if s.set == nil {
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
func (t *Transaction) elements(e *nfnetlink.Encoder, steps []Step) (n int) {
	e.Text(unix.NFTA_SET_ELEM_LIST_TABLE, steps[0].Table.Name)
	e.Text(unix.NFTA_SET_ELEM_LIST_SET, steps[0].set.Name)
	list := e.Open(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
	for n < len(steps) && steps[n].Verb == steps[0].Verb && steps[n].set == steps[0].set &&
		len(e.B)-list+steps[n].to-steps[n].from <= maxAttribute {
		e.B = append(e.B, t.B[steps[n].from:steps[n].to]...)
		n++
	}
	e.Close(list)
	return n
}

// explain says which step was refused, if one was.
func (t *Transaction) explain(err error, steps []Step) error {
	var r *nfnetlink.Refusal
	if errors.As(err, &r) {
		text, verb := t.message(steps, r.Message)
		return &Refusal{text, verb, r.Err}
	}
	return err
}

// message says in words what the n-th message of a batch was about, and its verb; -1 is all of it. It packs the steps
// once more to find out which of them that message had, as it knows only their number.
func (t *Transaction) message(steps []Step, n int) (text string, verb uint16) {
	i := 0
	for ; n > 0 && i < len(steps); n-- {
		if steps[i].set != nil {
			i += t.elements(&nfnetlink.Encoder{}, steps[i:])
		} else {
			i++
		}
	}
	if n < 0 || i >= len(steps) {
		return "the transaction", 0
	}
	s := &steps[i]
	about, deletes := s.subject()
	if text = "adding "; deletes {
		text = "deleting "
	}
	if s.set == nil {
		return text + t.object(s, about), s.Verb
	}
	text += s.set.Name + " " + t.describe(s)
	if others := t.elements(&nfnetlink.Encoder{}, steps[i:]) - 1; others > 0 {
		text += fmt.Sprintf(" or one of the %d after it", others)
	}
	return text, s.Verb
}

// subject is what steps are about.
type subject struct {
	words      string // between the names of the table and of the object
	name       uint16 // the attribute that has the latter
	want, have string // a Drift names so the object that is right, and one in its place
}

// subjects has them by the number of the message that adds one.
var subjects = map[uint16]subject{
	unix.NFT_MSG_NEWTABLE:     {want: "the table", have: "another table"},
	unix.NFT_MSG_NEWSET:       {": set ", unix.NFTA_SET_NAME, "a set", "a set that is not ours"},
	unix.NFT_MSG_NEWSETELEM:   {},
	unix.NFT_MSG_NEWCHAIN:     {": chain ", unix.NFTA_CHAIN_NAME, "its rules", "a chain that is not ours"},
	unix.NFT_MSG_NEWRULE:      {": chain ", unix.NFTA_RULE_CHAIN, "its rules", "other rules"},
	unix.NFT_MSG_NEWFLOWTABLE: {": flowtable ", flowtableName, "a flowtable", "a flowtable that is not wanted"},
}

// subject is what a step is about, and whether it deletes that. Each has its messages in the same order.
func (s *Step) subject() (about subject, deletes bool) {
	if about, adds := subjects[s.Verb]; adds {
		return about, false
	}
	return subjects[s.Verb-(unix.NFT_MSG_DELTABLE-unix.NFT_MSG_NEWTABLE)], true
}

// object names what a step is about that is no element.
func (t *Transaction) object(s *Step, about subject) string {
	if about.name == 0 {
		return s.Table.String()
	}
	return s.Table.String() + about.words + nfnetlink.Text(t.B[s.from:s.to], about.name)
}

// describe names the element that a step is about.
func (t *Transaction) describe(s *Step) string {
	e := t.element(s)
	if f := s.Table.Row; f != nil {
		if row, _ := f(s.set, e); row != "" {
			return row
		}
	}
	return s.set.describe(e)
}

// describe writes the parts of an element's key as people do.
func (s *Set) describe(e Element) string {
	var words []string
	key := e.Key
	for _, f := range s.Key {
		n := min(int(f.Words()*4), len(key))
		part := key[:n]
		key = key[n:]
		switch f {
		case Protocol:
			words = append(words, model.Protocol(part[0]).String())
		case Port:
			words = append(words, fmt.Sprint(binary.BigEndian.Uint16(part)))
		case Priority:
			words = append(words, fmt.Sprintf("%#x", Number(part)))
		default:
			a, _ := netip.AddrFromSlice(part)
			words = append(words, a.String())
		}
	}
	switch {
	case e.Chain != "":
		words = append(words, e.Chain)
	case e.End:
		words = append(words, "(where a range ends)")
	}
	return strings.Join(words, " ")
}
