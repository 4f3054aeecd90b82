package takeover

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nfnetlink"
)

// nftBatch is how many chains one transaction changes at most: other programs' must wait for it.
const nftBatch = 1000

// nftTries is how often a transaction is tried that failed because another program was faster.
const nftTries = 5

// nfTables is the nf_tables of an address family in the network namespace of the calling thread.
type nfTables struct {
	family family
	conn   *nfnetlink.Socket // from open to close
}

func (n *nfTables) open() (err error) {
	if n.conn, err = nfnetlink.Dial(); err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	return nil
}

func (n *nfTables) close() { _ = n.conn.Close() } // everything has been answered

// Attributes of all messages about a table and what it has.
const tableName = unix.NFTA_TABLE_NAME

func (n *nfTables) asking(verb uint16, reset func(), each func(attrs []byte)) nfnetlink.Request {
	return nfnetlink.Request{Kind: nfnetlink.NFTables | verb, Family: n.family.number, Reset: reset, Each: each}
}

// get asks for one object. It reports false where there is none, or no nf_tables in the kernel.
func (n *nfTables) get(r nfnetlink.Request) (exists bool, err error) {
	err = n.conn.Get(r)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINVAL) {
		return false, nil
	}
	return err == nil, err
}

// delete appends a message to a transaction. The name of a chain is an attribute of another number for each kind.
func (n *nfTables) delete(e *nfnetlink.Encoder, verb uint16, table string, more func()) {
	start := e.Message(nfnetlink.NFTables|verb, 0, n.family.number)
	e.Text(tableName, table)
	more()
	e.Finish(start)
}

// native is the tables of the mode nftables.
type native struct{ nfTables }

func (n *native) exists() (bool, error) {
	r := n.asking(unix.NFT_MSG_GETTABLE, nil, func([]byte) {})
	r.Filter.Text(tableName, nftablesTable)
	exists, err := n.get(r)
	if err != nil {
		return false, fmt.Errorf("nftables: find table %s %s: %w", n.family.name, nftablesTable, err)
	}
	return exists, nil
}

func (n *native) find(context.Context) ([]Leftover, error) {
	if err := n.open(); err != nil {
		return nil, err
	}
	defer n.close()
	exists, err := n.exists()
	if !exists || err != nil {
		return nil, err
	}
	return []Leftover{{Backend: "nftables", Family: n.family.name, Table: nftablesTable, What: "tables", Count: 1}}, nil
}

func (n *native) remove(context.Context) error {
	if err := n.open(); err != nil {
		return err
	}
	defer n.close()
	if exists, err := n.exists(); !exists || err != nil {
		return err
	}
	n.delete(n.conn.Begin(), unix.NFT_MSG_DELTABLE, nftablesTable, func() {})
	if err := n.conn.Commit(); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("nftables: delete table %s %s: %w", n.family.name, nftablesTable, err)
	}
	return nil
}

// compat is kube-proxy's chains in the tables that iptables-nft makes. It changes them rule by rule:
// what is not kube-proxy's does not move.
type compat struct {
	nfTables
	tables []string // in which chains can be kube-proxy's
	kept   *kept
}

func (x *compat) tool() string   { return x.family.prefix + "tables-nft" }
func (x *compat) String() string { return IPTablesNFT + " " + x.family.name }

func (x *compat) find(context.Context) ([]Leftover, error) {
	if err := x.open(); err != nil {
		return nil, err
	}
	defer x.close()
	chains, err := x.chains()
	if err != nil {
		return nil, err
	}
	var found []Leftover
	for _, table := range x.tables {
		p, err := x.plan(table, chains)
		if err != nil {
			return found, err
		}
		x.kept.note(p)
		at := Leftover{Backend: IPTablesNFT, Family: x.family.name, Table: table}
		found = append(found, p.leftovers(at, x.tool())...)
	}
	return found, nil
}

// nftChain is a chain, and whether it is one of the kernel's hooks.
type nftChain struct {
	table, name string
	base        bool
}

// chains are those of all tables.
func (x *compat) chains() (chains []nftChain, err error) {
	reset := func() { chains = nil }
	err = x.conn.Dump(x.asking(unix.NFT_MSG_GETCHAIN, reset, func(attrs []byte) {
		chains = append(chains, nftChain{
			table: nfnetlink.Text(attrs, unix.NFTA_CHAIN_TABLE), name: nfnetlink.Text(attrs, unix.NFTA_CHAIN_NAME),
			base: nfnetlink.Attribute(attrs, unix.NFTA_CHAIN_HOOK) != nil,
		})
	}))
	if errors.Is(err, unix.EINVAL) { // a kernel without nf_tables
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%s: list chains: %w", x.tool(), err)
	}
	return chains, nil
}

// plan reads a table. Only the rules of chains that are not kube-proxy's are read, and of those of
// kube-proxy's that stay for the sake of others.
func (x *compat) plan(table string, chains []nftChain) (plan, error) {
	var names []string
	var owned, foreign []nftChain
	for _, c := range chains {
		if c.table != table {
			continue
		}
		names = append(names, c.name)
		if ownedChain(table, c.name) {
			owned = append(owned, c)
		} else {
			foreign = append(foreign, c)
		}
	}
	if len(owned) == 0 {
		return plan{}, nil
	}
	keepForward := false
	if slices.ContainsFunc(owned, func(c nftChain) bool { return c.name == forwardChain }) {
		var err error
		if keepForward, err = x.keepsForward(table); err != nil {
			return plan{}, err
		}
	}
	if keepForward && len(owned) == 1 { // as it is for years; FORWARD is known to lead to it
		return newPlan(table, names, []jump{{from: forwardHook, fromBase: true, to: forwardChain}}, true), nil
	}
	jumps, err := x.jumps(foreign)
	if err != nil {
		return plan{}, err
	}
	p := newPlan(table, names, jumps, keepForward)
	if len(p.stay) == 0 {
		return p, nil
	}
	inside, err := x.jumps(owned) // rarely: what leads where inside
	return newPlan(table, names, append(jumps, inside...), keepForward), err
}

// keepsForward reports whether KUBE-FORWARD, if it is a table's, must stay.
func (x *compat) keepsForward(table string) (bool, error) {
	if table != filterTable {
		return false, nil
	}
	f, err := x.forward()
	return f.kube && x.kept.keeps(table, f), err
}

// forward looks at the chain FORWARD of this back end.
func (x *compat) forward() (f forward, err error) {
	exists, err := x.chain(filterTable, forwardHook, func(attrs []byte) {
		policy := nfnetlink.Attribute(attrs, unix.NFTA_CHAIN_POLICY)
		f.closed = len(policy) == 4 && binary.BigEndian.Uint32(policy) == nfDrop
	})
	if !exists || err != nil {
		return f, err
	}
	rules, err := x.rules(filterTable, forwardHook)
	for _, r := range rules {
		f.closed = f.closed || r.refusesAll
		f.kube = f.kube || r.to == forwardChain
	}
	return f, err
}

// chain reports whether there is a chain, and calls f with its attributes.
func (x *compat) chain(table, name string, f func(attrs []byte)) (exists bool, err error) {
	r := x.asking(unix.NFT_MSG_GETCHAIN, nil, f)
	r.Filter.Text(unix.NFTA_CHAIN_TABLE, table)
	r.Filter.Text(unix.NFTA_CHAIN_NAME, name)
	if exists, err = x.get(r); err != nil {
		return false, fmt.Errorf("%s: read chain %s of table %s: %w", x.tool(), name, table, err)
	}
	return exists, nil
}

func (x *compat) blocked() (bool, error) {
	if err := x.open(); err != nil {
		return false, err
	}
	defer x.close()
	f, err := x.forward()
	return f.closed && !f.kube, err
}

// jumps are the rules of some chains that lead to others; the id is their handle.
func (x *compat) jumps(chains []nftChain) (jumps []jump, err error) {
	for _, c := range chains {
		rules, err := x.rules(c.table, c.name)
		if err != nil {
			return nil, err
		}
		for _, r := range rules {
			if r.to != "" {
				jumps = append(jumps, jump{from: c.name, fromBase: c.base, to: r.to, id: int(r.handle)})
			}
		}
	}
	return jumps, nil
}

// nftRule is what matters of a rule.
type nftRule struct {
	handle     uint64
	to         string // the chain that it jumps or goes to; empty: none
	refusesAll bool   // it drops or rejects whatever comes
}

func (x *compat) rules(table, chain string) (rules []nftRule, err error) {
	r := x.asking(unix.NFT_MSG_GETRULE, func() { rules = nil }, func(attrs []byte) {
		expressions := nfnetlink.Attribute(attrs, unix.NFTA_RULE_EXPRESSIONS)
		rules = append(rules, nftRule{
			nfnetlink.Uint64(attrs, unix.NFTA_RULE_HANDLE), nfnetlink.VerdictChain(expressions), refusesAll(expressions),
		})
	})
	r.Filter.Text(unix.NFTA_RULE_TABLE, table)
	r.Filter.Text(unix.NFTA_RULE_CHAIN, chain)
	if err := x.conn.Dump(r); err != nil {
		return nil, fmt.Errorf("%s: list rules of chain %s of table %s: %w", x.tool(), chain, table, err)
	}
	return rules, nil
}

// refusesAll reports whether the expressions of a rule drop or reject whatever comes.
func refusesAll(expressions []byte) bool {
	refuses, looks := false, false
	nfnetlink.Attributes(expressions, func(_ uint16, e []byte) {
		switch nfnetlink.Text(e, unix.NFTA_EXPR_NAME) {
		case "counter":
		case "immediate":
			code := nfnetlink.Attribute(nfnetlink.Verdict(e), unix.NFTA_VERDICT_CODE)
			refuses = len(code) == 4 && binary.BigEndian.Uint32(code) == nfDrop
		case "reject":
			refuses = true
		case "target":
			refuses = nfnetlink.Text(nfnetlink.Attribute(e, unix.NFTA_EXPR_DATA), unix.NFTA_TARGET_NAME) == "REJECT"
		default:
			looks = true // at the packet
		}
	})
	return refuses && !looks
}

func (x *compat) remove(ctx context.Context) error {
	if err := x.open(); err != nil {
		return err
	}
	defer x.close()
	var errs []error
	for _, table := range x.tables {
		var err error
		for range nftTries {
			// Another program may have changed between our reading and our writing what we are about to
			// delete: then that is read again.
			if err = x.removeFrom(ctx, table); !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EBUSY) {
				break
			}
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: table %s: delete chains: %w", x.tool(), table, err))
		}
	}
	return errors.Join(errs...)
}

// removeFrom first cuts, in one transaction, the chains off the hooks: then packets go past them, and
// the rest may take its time.
func (x *compat) removeFrom(ctx context.Context, table string) error {
	chains, err := x.chains()
	if err != nil {
		return err
	}
	p, err := x.plan(table, chains)
	if err != nil {
		return err
	}
	x.kept.note(p)
	e := x.conn.Begin()
	for _, j := range p.jumps {
		x.delete(e, unix.NFT_MSG_DELRULE, table, func() {
			e.Text(unix.NFTA_RULE_CHAIN, j.from)
			e.Bytes(unix.NFTA_RULE_HANDLE, binary.BigEndian.AppendUint64(nil, uint64(j.id)))
		})
	}
	if len(p.jumps) > 0 {
		err = x.conn.Commit()
	}
	// A chain can only be deleted when no other one leads to it.
	for _, step := range []struct{ verb, name uint16 }{
		{unix.NFT_MSG_DELRULE, unix.NFTA_RULE_CHAIN}, {unix.NFT_MSG_DELCHAIN, unix.NFTA_CHAIN_NAME},
	} {
		for some := range slices.Chunk(p.chains, nftBatch) {
			if err = errors.Join(err, ctx.Err()); err != nil {
				return err
			}
			e := x.conn.Begin()
			for _, name := range some {
				x.delete(e, step.verb, table, func() { e.Text(step.name, name) })
			}
			err = x.conn.Commit()
		}
	}
	return err
}
