package nftables

import (
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/nf"
)

// setChain makes the kernel hold a chain with exactly these rules.
func (t *table) setChain(c chain) error {
	var marks []string
	var bodies [][]byte
	for _, r := range c.rules {
		body, mark, err := r.mark(t.family)
		if err != nil {
			return err
		}
		marks, bodies = append(marks, string(mark)), append(bodies, body)
	}
	have, exists := t.chains[c.name]
	if exists && slices.Equal(have, marks) {
		return nil
	}
	if exists {
		t.flushChain(c.name)
	} else {
		t.newChain(c)
	}
	for i, r := range c.rules {
		t.tx.join() // a chain is never seen without its rules
		t.newRule(c.name, r, bodies[i], marks[i])
	}
	t.chains[c.name] = marks
	return nil
}

func (t *table) newChain(c chain) {
	t.tx.begin(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, t)
	t.tx.Text(unix.NFTA_CHAIN_TABLE, t.name)
	t.tx.Text(unix.NFTA_CHAIN_NAME, c.name)
	if c.hook != nil {
		h := t.tx.Open(unix.NFTA_CHAIN_HOOK)
		t.tx.Uint32(unix.NFTA_HOOK_HOOKNUM, c.hook.number)
		t.tx.Uint32(unix.NFTA_HOOK_PRIORITY, uint32(c.hook.priority))
		t.tx.Close(h)
		t.tx.Text(unix.NFTA_CHAIN_TYPE, c.hook.kind)
	}
	t.tx.end()
}

func (t *table) flushChain(name string) {
	t.tx.begin(unix.NFT_MSG_DELRULE, 0, t)
	t.tx.Text(unix.NFTA_RULE_TABLE, t.name)
	t.tx.Text(unix.NFTA_RULE_CHAIN, name)
	t.tx.end()
}

func (t *table) deleteChain(name string) {
	t.flushChain(name)
	t.tx.join()
	t.tx.begin(unix.NFT_MSG_DELCHAIN, 0, t)
	t.tx.Text(unix.NFTA_CHAIN_TABLE, t.name)
	t.tx.Text(unix.NFTA_CHAIN_NAME, name)
	t.tx.end()
	delete(t.chains, name)
}

func (t *table) newRule(chain string, r rule, body []byte, mark string) {
	t.tx.begin(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, t)
	t.tx.Text(unix.NFTA_RULE_TABLE, t.name)
	t.tx.Text(unix.NFTA_RULE_CHAIN, chain)
	t.tx.Bytes(unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, body)
	t.tx.Bytes(unix.NFTA_RULE_USERDATA, nf.RuleUserData(mark, r.comment))
	t.tx.end()
}

func (t *table) newTable() {
	t.tx.begin(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, t)
	t.tx.Text(unix.NFTA_TABLE_NAME, t.name)
	t.tx.end()
}

func (t *table) deleteTable() {
	t.tx.begin(unix.NFT_MSG_DELTABLE, 0, t)
	t.tx.Text(unix.NFTA_TABLE_NAME, t.name)
	t.tx.end()
}

func (t *table) newSet(s *set) {
	t.tx.begin(unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, t)
	t.tx.Text(unix.NFTA_SET_TABLE, t.name)
	t.tx.Text(unix.NFTA_SET_NAME, s.name)
	t.tx.Uint32(unix.NFTA_SET_FLAGS, s.flags)
	t.tx.Uint32(unix.NFTA_SET_KEY_TYPE, kind(s.key))
	t.tx.Uint32(unix.NFTA_SET_KEY_LEN, size(s.key))
	t.tx.Uint32(unix.NFTA_SET_ID, s.id)
	switch {
	case s.data != nil:
		t.tx.Uint32(unix.NFTA_SET_DATA_TYPE, kind(s.data))
		t.tx.Uint32(unix.NFTA_SET_DATA_LEN, size(s.data))
	case s.flags&unix.NFT_SET_MAP != 0:
		t.tx.Uint32(unix.NFTA_SET_DATA_TYPE, unix.NFT_DATA_VERDICT)
	}
	desc := t.tx.Open(unix.NFTA_SET_DESC)
	if s.maximum > 0 {
		t.tx.Uint32(unix.NFTA_SET_DESC_SIZE, s.maximum)
	}
	if s.flags&setConcat != 0 {
		t.concatenation(s.key)
	}
	t.tx.Close(desc)
	t.tx.Bytes(unix.NFTA_SET_USERDATA, s.userData())
	t.tx.end()
}

// userData tells nft, which prints them, that single keys and data of ours are in host byte order.
func (s *set) userData() (b []byte) {
	const keyByteOrder, dataByteOrder, host, network = 0, 1, 1, 2
	order := func(kind byte, fields []field) {
		o := byte(network)
		if len(fields) == 1 && fields[0] == priorityField {
			o = host
		}
		b = append(b, kind, 4, o, 0, 0, 0)
	}
	order(keyByteOrder, s.key)
	if s.data != nil {
		order(dataByteOrder, s.data)
	}
	return b
}

// concatenation describes the parts of the key to sets that look up ranges.
func (t *table) concatenation(key []field) {
	c := t.tx.Open(setDescConcat)
	for _, f := range key {
		e := t.tx.Open(unix.NFTA_LIST_ELEM)
		t.tx.Uint32(setFieldLen, f.size)
		t.tx.Close(e)
	}
	t.tx.Close(c)
}

// structure makes the table, its sets and its constant chains.
func (t *table) structure() error {
	if !t.exists {
		t.newTable()
		t.exists = true
	}
	for _, s := range t.sets {
		if !t.foundSets[s.name] {
			t.newSet(s)
			t.foundSets[s.name] = true
		}
	}
	for _, c := range t.constantChains() {
		if err := t.setChain(c); err != nil {
			return err
		}
	}
	return nil
}
