package nft

import (
	"encoding/binary"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// Table is what we know of our table of one family in the kernel. We own what is in it. The methods that change it
// append steps to Tx and assume that they will be done.
type Table struct {
	Family        Family
	Name          string
	Mark          uint32   // the packets' bit that has their source replaced
	PodInterfaces []string // whose packets are of pods
	Sets          []*Set
	// Owned has the kernel delete the table with the socket that has made it (Linux 5.12), however the process ends.
	Owned bool
	// Form, if not nil, is the form of a set that is not one of Sets, by its name; nil: there is none of the name.
	Form func(name string) *Set
	// Serve names the chain to which a destination leads that is found; empty: that of its class.
	Serve string
	Tx    *Transaction
	// Row, if not nil, names the row of which an element is a part, in the words of the model, and the row's wanted
	// content. If that is empty, it is the same in all planes.
	Row func(*Set, Element) (row, want string)

	Exists    bool
	Foreign   bool // made by another version: to be replaced, not taken over
	FoundSets map[string]bool
	Chains    map[string][]string // by name: the marks of the rules

	owned
	constant map[string]bool // names of the chains of Structure
	made     bool            // by Structure: there was none
}

// String names the table as people do.
func (t *Table) String() string { return "table " + t.Family.Name + " " + t.Name }

// Structure makes the table, its sets and the chains that it always has.
func (t *Table) Structure(chains []Chain) error {
	if !t.Exists {
		t.Object(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, 0, "")
		if t.Owned {
			t.Tx.Uint32(unix.NFTA_TABLE_FLAGS, tableOwner)
		}
		t.Tx.End()
		t.Exists, t.made = true, true
	}
	for _, s := range t.Sets {
		t.AddSet(s)
	}
	t.constant = map[string]bool{}
	for _, c := range chains { // before the rules that lead to them
		t.constant[c.Name] = true
		if _, exists := t.Chains[c.Name]; !exists {
			t.NewChain(c)
			t.Tx.Join()
			t.Chains[c.Name] = nil
		}
	}
	for _, c := range chains {
		if err := t.SetChain(c); err != nil {
			return err
		}
	}
	return nil
}

// Delete deletes the table with all that is in it.
func (t *Table) Delete() {
	t.Object(unix.NFT_MSG_DELTABLE, 0, 0, "")
	t.Tx.End()
}

// SetChain makes the kernel hold a chain with exactly these rules. The rules of a chain are compared by the marks that
// they have in the kernel. Their expressions cannot be compared: the kernel lists these in another form than it takes
// them. If one rule differs, all are replaced, within one kernel transaction, so that no packet sees a part of them.
func (t *Table) SetChain(c Chain) error {
	var marks []string
	var bodies [][]byte
	for _, r := range c.Rules {
		body, mark, err := r.encode(t.Family)
		if err != nil {
			return err
		}
		marks, bodies = append(marks, mark), append(bodies, body)
	}
	have, exists := t.Chains[c.Name]
	switch {
	case exists && slices.Equal(have, marks):
		return nil
	case !exists:
		t.NewChain(c)
	case len(have) > 0:
		t.Flush(c.Name)
	}
	for i, r := range c.Rules {
		t.Tx.Join() // a chain is never seen without its rules
		t.Object(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, unix.NFTA_RULE_CHAIN, c.Name)
		t.Tx.Bytes(unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, bodies[i])
		t.Tx.Bytes(unix.NFTA_RULE_USERDATA, RuleData(marks[i], r.comment))
		t.Tx.End()
	}
	t.Chains[c.Name] = marks
	return nil
}

// DeleteChain deletes a chain and its rules.
func (t *Table) DeleteChain(name string) {
	t.Flush(name)
	t.Tx.Join()
	t.Object(unix.NFT_MSG_DELCHAIN, 0, unix.NFTA_CHAIN_NAME, name)
	t.Tx.End()
	delete(t.Chains, name)
}

// SweepChains deletes all chains but those that the table always has, and these.
func (t *Table) SweepChains(keep map[string]bool) {
	for name := range t.Chains {
		if !t.constant[name] && !keep[name] {
			t.DeleteChain(name)
		}
	}
}

// Flush deletes the rules of a chain, or of all if the name is empty.
func (t *Table) Flush(chain string) {
	t.Object(unix.NFT_MSG_DELRULE, 0, unix.NFTA_RULE_CHAIN, chain)
	t.Tx.End()
}

// AddSet makes a set, unless it is there.
func (t *Table) AddSet(s *Set) {
	if !t.FoundSets[s.Name] {
		t.newSet(s)
		t.FoundSets[s.Name] = true
	}
}

// DeleteSet deletes a set and its elements.
func (t *Table) DeleteSet(name string) {
	t.Object(unix.NFT_MSG_DELSET, 0, unix.NFTA_SET_NAME, name)
	t.Tx.End()
	delete(t.FoundSets, name)
}

// Object begins a step about an object in the table, by its name; without a name it is about the table itself. More
// attributes may follow in Tx, whose End ends the step.
func (t *Table) Object(verb, flags, kind uint16, name string) {
	const table = unix.NFTA_TABLE_NAME // the table's name has this number in all kinds of messages
	t.Tx.begin(verb, flags, t)
	t.Tx.Text(table, t.Name)
	if name != "" {
		t.Tx.Text(kind, name)
	}
}

// NewChain makes a chain without its rules.
func (t *Table) NewChain(c Chain) {
	t.Object(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, unix.NFTA_CHAIN_NAME, c.Name)
	if c.Hook != nil {
		h := t.Tx.Open(unix.NFTA_CHAIN_HOOK)
		t.Tx.Uint32(unix.NFTA_HOOK_HOOKNUM, c.Hook.Number)
		t.Tx.Uint32(unix.NFTA_HOOK_PRIORITY, uint32(c.Hook.Priority))
		t.Tx.Close(h)
		t.Tx.Text(unix.NFTA_CHAIN_TYPE, c.Hook.Kind)
	}
	if c.UserData != nil {
		t.Tx.Bytes(ChainUserData, c.UserData)
	}
	t.Tx.End()
}

func (t *Table) newSet(s *Set) {
	t.Object(unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, unix.NFTA_SET_NAME, s.Name)
	t.Tx.Uint32(unix.NFTA_SET_FLAGS, s.Flags)
	t.Tx.Uint32(unix.NFTA_SET_KEY_TYPE, s.kind())
	t.Tx.Uint32(unix.NFTA_SET_KEY_LEN, size(s.Key))
	t.Tx.Uint32(unix.NFTA_SET_ID, uint32(len(t.FoundSets)+1)) // in this transaction
	switch {
	case s.Data != nil:
		t.Tx.Uint32(unix.NFTA_SET_DATA_TYPE, kind(s.Data))
		t.Tx.Uint32(unix.NFTA_SET_DATA_LEN, size(s.Data))
	case s.Verdicts():
		t.Tx.Uint32(unix.NFTA_SET_DATA_TYPE, unix.NFT_DATA_VERDICT)
	}
	desc := t.Tx.Open(unix.NFTA_SET_DESC)
	if s.Maximum > 0 {
		t.Tx.Uint32(unix.NFTA_SET_DESC_SIZE, s.Maximum)
	}
	t.Tx.Close(desc)
	t.Tx.Bytes(unix.NFTA_SET_USERDATA, s.userData())
	t.Tx.End()
}

// userData tells nft, which prints them, that single keys and data of ours are in host byte order.
func (s *Set) userData() (b []byte) {
	const keyByteOrder, dataByteOrder, host, network = 0, 1, 1, 2
	order := func(kind byte, fields []Field) {
		o := byte(network)
		if len(fields) == 1 && fields[0] == Priority {
			o = host
		}
		b = append(b, kind, 4, o, 0, 0, 0)
	}
	order(keyByteOrder, s.Key)
	if s.Data != nil {
		order(dataByteOrder, s.Data)
	}
	return b
}

// Element adds an element to a set, or deletes it. The key of a range is its first and its last address, after the
// fields that come before them; data is the name of a chain in a verdict map.
func (t *Table) Element(verb uint16, set int, key, data []byte) {
	t.ElementOf(verb, t.Sets[set], key, data)
}

// ElementOf is Element for any set.
func (t *Table) ElementOf(verb uint16, s *Set, key, data []byte) {
	if !s.Interval() {
		t.begin(verb, s, key)
		t.data(verb, s, data)
		if verb == unix.NFT_MSG_NEWSETELEM && s.counts(data) {
			t.counter()
		}
		t.end()
		return
	}
	address := int(t.Family.Address.size())
	n := len(key) - address
	t.begin(verb, s, key[:n])
	t.end()
	if end := after(slices.Concat(key[:n-address], key[n:])); end != nil {
		t.Tx.Join()
		t.begin(verb, s, end)
		t.Tx.Uint32(unix.NFTA_SET_ELEM_FLAGS, unix.NFT_SET_ELEM_INTERVAL_END)
		t.end()
	}
}

// after is the next key; nil: there is none, and a range that reaches so far has no end element. An end element has the
// first key that is not in the range any more.
func after(key []byte) []byte {
	for i := len(key) - 1; i >= 0; i-- {
		if key[i]++; key[i] != 0 {
			return key
		}
	}
	return nil
}

// before is the previous key.
func before(key []byte) []byte {
	key = slices.Clone(key)
	for i := len(key) - 1; i >= 0; i-- {
		if key[i]--; key[i] != 0xff {
			break
		}
	}
	return key
}

// Life is how long an element lasts from when it is used, and how much of that is left.
type Life struct{ Lasts, Left time.Duration }

// Timed adds an element that goes by itself. That one with the same data is there already is no error.
func (t *Table) Timed(s *Set, key, data []byte, l Life) {
	milliseconds := func(d time.Duration) []byte {
		return binary.BigEndian.AppendUint64(nil, uint64(max(d.Milliseconds(), 1)))
	}
	t.begin(unix.NFT_MSG_NEWSETELEM, s, key)
	t.Tx.last().flags = unix.NLM_F_CREATE
	t.data(unix.NFT_MSG_NEWSETELEM, s, data)
	t.Tx.Bytes(unix.NFTA_SET_ELEM_TIMEOUT, milliseconds(l.Lasts))
	t.Tx.Bytes(unix.NFTA_SET_ELEM_EXPIRATION, milliseconds(l.Left))
	t.end()
}

// begin opens a step for one element of which more attributes follow.
func (t *Table) begin(verb uint16, s *Set, key []byte) {
	var flags uint16
	if verb == unix.NFT_MSG_NEWSETELEM {
		flags = unix.NLM_F_CREATE | unix.NLM_F_EXCL // what is there already is not what we think
	}
	t.Tx.begin(verb, flags, t).set = s
	t.Tx.Open(unix.NFTA_LIST_ELEM)
	k := t.Tx.Open(unix.NFTA_SET_ELEM_KEY)
	t.Tx.Bytes(unix.NFTA_DATA_VALUE, key)
	t.Tx.Close(k)
}

func (t *Table) end() {
	t.Tx.Close(t.Tx.last().from)
	t.Tx.End()
}

func (t *Table) data(verb uint16, s *Set, data []byte) {
	if verb != unix.NFT_MSG_NEWSETELEM || s.Flags&unix.NFT_SET_MAP == 0 {
		return
	}
	d := t.Tx.Open(unix.NFTA_SET_ELEM_DATA)
	if s.Verdicts() {
		verdict := t.Tx.Open(unix.NFTA_DATA_VERDICT)
		code := int64(unix.NFT_GOTO)
		if s.Jump {
			code = unix.NFT_JUMP
		}
		t.Tx.Uint32(unix.NFTA_VERDICT_CODE, uint32(0xffffffff&code))
		t.Tx.Text(unix.NFTA_VERDICT_CHAIN, string(data))
		t.Tx.Close(verdict)
	} else {
		t.Tx.Bytes(unix.NFTA_DATA_VALUE, data)
	}
	t.Tx.Close(d)
}
