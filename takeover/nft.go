package takeover

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"slices"

	"github.com/google/nftables"
	mdlayher "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// nftBatch is how many messages one transaction has at most: their acknowledgements must fit into the
// socket's buffer, of which each takes almost a kilobyte.
const (
	nftBatch  = 1000
	nftBuffer = 8 << 20
)

// nftTries is how often a transaction is tried that failed because somebody else was faster.
const nftTries = 5

// openNFT opens a connection and says how to close it.
func openNFT() (c *nftables.Conn, closeIt func(), err error) {
	c, err = nftables.New(nftables.AsLasting(), nftables.WithSockOptions(func(c *mdlayher.Conn) error {
		return errors.Join(c.SetReadBuffer(nftBuffer), c.SetWriteBuffer(nftBuffer))
	}))
	if err != nil {
		return nil, nil, fmt.Errorf("nftables: open netlink: %w", err)
	}
	return c, func() { _ = c.CloseLasting() }, nil // everything has been answered
}

// native is the tables of the mode nftables.
type native struct{ family family }

func (n *native) exists(c *nftables.Conn) (bool, error) {
	list, err := c.ListTablesOfFamily(nftables.TableFamily(n.family.number))
	if errors.Is(err, unix.EINVAL) { // a kernel without nf_tables
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("nftables: list tables of %s: %w", n.family.name, err)
	}
	named := func(t *nftables.Table) bool { return t.Name == nftablesTable }
	return slices.ContainsFunc(list, named), nil
}

func (n *native) find(context.Context) ([]Leftover, error) {
	c, closeIt, err := openNFT()
	if err != nil {
		return nil, err
	}
	defer closeIt()
	exists, err := n.exists(c)
	if !exists || err != nil {
		return nil, err
	}
	return []Leftover{{Backend: "nftables", Family: n.family.name, Table: nftablesTable, What: "tables", Count: 1}}, nil
}

func (n *native) remove(context.Context) error {
	c, closeIt, err := openNFT()
	if err != nil {
		return err
	}
	defer closeIt()
	if exists, err := n.exists(c); !exists || err != nil {
		return err
	}
	c.DelTable(&nftables.Table{Name: nftablesTable, Family: nftables.TableFamily(n.family.number)})
	if err := c.Flush(); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("nftables: delete table %s %s: %w", n.family.name, nftablesTable, err)
	}
	return nil
}

// compat is kube-proxy's chains in the tables that iptables-nft makes. It changes them rule by rule:
// what is not kube-proxy's does not move.
type compat struct {
	family family
	tables []string // in which chains can be kube-proxy's
	kept   *kept
}

func (x *compat) tool() string   { return x.family.prefix + "tables-nft" }
func (x *compat) String() string { return IPTablesNFT + " " + x.family.name }

func (x *compat) table(name string) *nftables.Table {
	return &nftables.Table{Name: name, Family: nftables.TableFamily(x.family.number)}
}

func (x *compat) find(context.Context) ([]Leftover, error) {
	c, closeIt, err := openNFT()
	if err != nil {
		return nil, err
	}
	defer closeIt()
	chains, err := x.chains(c)
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
		found = append(found, x.leftovers(table, p)...)
	}
	return found, nil
}

func (x *compat) leftovers(table string, p plan) []Leftover {
	return p.leftovers(Leftover{Backend: IPTablesNFT, Family: x.family.name, Table: table}, x.tool())
}

// chains are those of all tables.
func (x *compat) chains(c *nftables.Conn) ([]*nftables.Chain, error) {
	chains, err := c.ListChainsOfTableFamily(nftables.TableFamily(x.family.number))
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
func (x *compat) plan(table string, chains []*nftables.Chain) (plan, error) {
	var names, owned, foreign []string
	base := map[string]bool{}
	for _, c := range chains {
		if c.Table.Name != table {
			continue
		}
		names = append(names, c.Name)
		base[c.Name] = c.Hooknum != nil
		if ownedChain(table, c.Name) {
			owned = append(owned, c.Name)
		} else {
			foreign = append(foreign, c.Name)
		}
	}
	if len(owned) == 0 {
		return plan{}, nil
	}
	keepForward, err := x.keepsForward(table, owned)
	if err != nil {
		return plan{}, err
	}
	if keepForward && len(owned) == 1 { // as it is for years; FORWARD is known to lead to it
		return newPlan(table, names, []jump{{from: forwardHook, fromBase: true, to: forwardChain}}, true), nil
	}
	jumps, err := x.jumps(table, foreign, base)
	if err != nil {
		return plan{}, err
	}
	p := newPlan(table, names, jumps, keepForward)
	if len(p.stay) == 0 {
		return p, nil
	}
	inside, err := x.jumps(table, owned, base) // rarely: what leads where inside
	return newPlan(table, names, append(jumps, inside...), keepForward), err
}

// keepsForward reports whether KUBE-FORWARD, if the table has it, must stay.
func (x *compat) keepsForward(table string, owned []string) (bool, error) {
	if table != filterTable || !slices.Contains(owned, forwardChain) {
		return false, nil
	}
	f, err := x.forward()
	return f.kube && x.kept.keeps(table, f), err
}

// forward looks at the chain FORWARD of this back end.
func (x *compat) forward() (forward, error) {
	var f forward
	chain, err := x.chain(filterTable, forwardHook)
	if chain == nil || err != nil {
		return f, err
	}
	policy := chain[unix.NFTA_CHAIN_POLICY]
	f.closed = len(policy) == 4 && binary.BigEndian.Uint32(policy) == nfDrop
	rules, err := x.rules(filterTable, forwardHook)
	for _, r := range rules {
		expressions := r[unix.NFTA_RULE_EXPRESSIONS]
		f.closed = f.closed || refusesAll(expressions)
		f.kube = f.kube || destination(expressions) == forwardChain
	}
	return f, err
}

// chain are the attributes of a chain; nil: there is none.
func (x *compat) chain(table, name string) (map[uint16][]byte, error) {
	request := x.request(unix.NFT_MSG_GETCHAIN, 0)
	request.AddData(nl.NewRtAttr(unix.NFTA_CHAIN_TABLE, nl.ZeroTerminated(table)))
	request.AddData(nl.NewRtAttr(unix.NFTA_CHAIN_NAME, nl.ZeroTerminated(name)))
	answer, err := request.Execute(unix.NETLINK_NETFILTER, 0)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINVAL) { // the latter is a kernel without nf_tables
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%s: read chain %s of table %s: %w", x.tool(), name, table, err)
	}
	for _, m := range answer {
		return inMessage(m), nil
	}
	return nil, nil
}

func (x *compat) blocked() (bool, error) {
	f, err := x.forward()
	return f.closed && !f.kube, err
}

func (x *compat) request(kind, flags int) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|kind, flags)
	r.AddData(&nl.Nfgenmsg{NfgenFamily: x.family.number, Version: nl.NFNETLINK_V0})
	return r
}

// jumps are the rules of some chains that lead to others; the id is their handle.
func (x *compat) jumps(table string, chains []string, base map[string]bool) ([]jump, error) {
	var jumps []jump
	for _, chain := range chains {
		rules, err := x.rules(table, chain)
		if err != nil {
			return nil, err
		}
		for _, r := range rules {
			handle := r[unix.NFTA_RULE_HANDLE]
			if to := destination(r[unix.NFTA_RULE_EXPRESSIONS]); to != "" && len(handle) == 8 {
				id := int(binary.BigEndian.Uint64(handle))
				jumps = append(jumps, jump{from: chain, fromBase: base[chain], to: to, id: id})
			}
		}
	}
	return jumps, nil
}

// rules are the attributes of a chain's rules.
func (x *compat) rules(table, chain string) ([]map[uint16][]byte, error) {
	request := x.request(unix.NFT_MSG_GETRULE, unix.NLM_F_DUMP)
	request.AddData(nl.NewRtAttr(unix.NFTA_RULE_TABLE, nl.ZeroTerminated(table)))
	request.AddData(nl.NewRtAttr(unix.NFTA_RULE_CHAIN, nl.ZeroTerminated(chain)))
	var messages [][]byte
	var err error
	for range nftTries {
		messages, err = request.Execute(unix.NETLINK_NETFILTER, 0)
		if !errors.Is(err, netlink.ErrDumpInterrupted) && !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if errors.Is(err, unix.ENOENT) { // it went meanwhile
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%s: list rules of chain %s of table %s: %w", x.tool(), chain, table, err)
	}
	rules := make([]map[uint16][]byte, 0, len(messages))
	for _, m := range messages {
		rules = append(rules, inMessage(m))
	}
	return rules, nil
}

// destination is the chain that the expressions of a rule jump or go to.
func destination(expressions []byte) string {
	for _, e := range all(expressions) {
		if chain := verdict(e)[unix.NFTA_VERDICT_CHAIN]; chain != nil {
			return unix.ByteSliceToString(chain)
		}
	}
	return ""
}

// refusesAll reports whether the expressions of a rule drop or reject whatever comes.
func refusesAll(expressions []byte) bool {
	refuses := false
	for _, e := range all(expressions) {
		switch unix.ByteSliceToString(e[unix.NFTA_EXPR_NAME]) {
		case "counter":
		case "immediate":
			code := verdict(e)[unix.NFTA_VERDICT_CODE]
			refuses = len(code) == 4 && binary.BigEndian.Uint32(code) == nfDrop
		case "reject":
			refuses = true
		case "target":
			refuses = unix.ByteSliceToString(attributes(e[unix.NFTA_EXPR_DATA])[unix.NFTA_TARGET_NAME]) == "REJECT"
		default: // it looks at the packet
			return false
		}
	}
	return refuses
}

// all are the attributes of a rule's expressions.
func all(expressions []byte) []map[uint16][]byte {
	var list []map[uint16][]byte
	for kind, element := range nested(expressions) {
		if kind == unix.NFTA_LIST_ELEM {
			list = append(list, attributes(element))
		}
	}
	return list
}

// verdict are the attributes of that which an expression has.
func verdict(expression map[uint16][]byte) map[uint16][]byte {
	if unix.ByteSliceToString(expression[unix.NFTA_EXPR_NAME]) != "immediate" {
		return nil
	}
	data := attributes(attributes(expression[unix.NFTA_EXPR_DATA])[unix.NFTA_IMMEDIATE_DATA])
	return attributes(data[unix.NFTA_DATA_VERDICT])
}

// attributes are netlink attributes by their type.
func attributes(b []byte) map[uint16][]byte {
	all := map[uint16][]byte{}
	for kind, value := range nested(b) {
		all[kind] = value
	}
	return all
}

// inMessage are those of a message, behind its header.
func inMessage(m []byte) map[uint16][]byte { return attributes(m[min(nl.SizeofNfgenmsg, len(m)):]) }

// nested are netlink attributes in their order. Where they are malformed there are none.
func nested(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		list, err := mdlayher.NewAttributeDecoder(b) // nl.ParseRouteAttr panics where the last one is not padded
		if err != nil {
			return
		}
		for list.Next() && yield(list.Type(), list.Bytes()) {
			continue
		}
	}
}

func (x *compat) remove(ctx context.Context) error {
	c, closeIt, err := openNFT()
	if err != nil {
		return err
	}
	defer closeIt()
	var errs []error
	for _, table := range x.tables {
		var err error
		for range nftTries {
			// Somebody may have changed between our reading and our writing what we are about to
			// delete: then that is read again.
			if err = x.removeFrom(ctx, c, table); !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EBUSY) {
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
func (x *compat) removeFrom(ctx context.Context, c *nftables.Conn, table string) error {
	chains, err := x.chains(c)
	if err != nil {
		return err
	}
	p, err := x.plan(table, chains)
	if err != nil {
		return err
	}
	x.kept.note(p)
	t := x.table(table)
	for _, j := range p.jumps {
		rule := &nftables.Rule{Table: t, Chain: &nftables.Chain{Name: j.from}, Handle: uint64(j.id)}
		if err := c.DelRule(rule); err != nil {
			return err
		}
	}
	if err := c.Flush(); err != nil {
		return err
	}
	// A chain can only be deleted when no other one leads to it.
	flush := func(name string) { c.FlushChain(&nftables.Chain{Table: t, Name: name}) }
	if err := inBatches(ctx, c, p.chains, flush); err != nil {
		return err
	}
	return inBatches(ctx, c, p.chains, func(name string) { c.DelChain(&nftables.Chain{Table: t, Name: name}) })
}

func inBatches(ctx context.Context, c *nftables.Conn, names []string, add func(name string)) error {
	for some := range slices.Chunk(names, nftBatch) {
		if err := ctx.Err(); err != nil {
			return err
		}
		for _, name := range some {
			add(name)
		}
		if err := c.Flush(); err != nil {
			return err
		}
	}
	return nil
}
