package takeover

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"log/slog"
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
	log    *slog.Logger
}

func (x *compat) tool() string { return x.family.prefix + "tables-nft" }

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
	for _, table := range tables {
		p, err := x.plan(table, chains)
		if err != nil {
			return found, err
		}
		found = append(found, x.leftovers(table, p)...)
	}
	return found, nil
}

func (x *compat) leftovers(table string, p plan) []Leftover {
	return p.leftovers(Leftover{Backend: "iptables-nft", Family: x.family.name, Table: table}, x.tool())
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
	var names []string
	base := map[string]bool{}
	owned := false
	for _, c := range chains {
		if c.Table.Name == table {
			names = append(names, c.Name)
			base[c.Name] = c.Hooknum != nil
			owned = owned || ownedChain(table, c.Name)
		}
	}
	if !owned {
		return plan{}, nil
	}
	var jumps []jump
	for _, name := range names {
		if ownedChain(table, name) {
			continue
		}
		some, err := x.jumps(table, name)
		if err != nil {
			return plan{}, err
		}
		for _, j := range some {
			j.fromBase = base[name]
			jumps = append(jumps, j)
		}
	}
	p := newPlan(table, names, jumps)
	if len(p.stay) == 0 {
		return p, nil
	}
	for _, name := range names { // rarely: what leads where inside
		if ownedChain(table, name) {
			some, err := x.jumps(table, name)
			if err != nil {
				return plan{}, err
			}
			jumps = append(jumps, some...)
		}
	}
	return newPlan(table, names, jumps), nil
}

// jumps are the rules of a chain that lead to another one; the id is their handle.
func (x *compat) jumps(table, chain string) ([]jump, error) {
	request := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETRULE, unix.NLM_F_DUMP)
	request.AddData(&nl.Nfgenmsg{NfgenFamily: x.family.number, Version: nl.NFNETLINK_V0})
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
	var jumps []jump
	for _, m := range messages {
		rule := attributes(m[nl.SizeofNfgenmsg:])
		handle := rule[unix.NFTA_RULE_HANDLE]
		if to := destination(rule[unix.NFTA_RULE_EXPRESSIONS]); to != "" && len(handle) == 8 {
			jumps = append(jumps, jump{from: chain, to: to, id: int(binary.BigEndian.Uint64(handle))})
		}
	}
	return jumps, nil
}

// destination is the chain that the expressions of a rule jump or go to.
func destination(expressions []byte) string {
	for kind, element := range nested(expressions) {
		e := attributes(element)
		if kind != unix.NFTA_LIST_ELEM || cString(e[unix.NFTA_EXPR_NAME]) != "immediate" {
			continue
		}
		data := attributes(attributes(e[unix.NFTA_EXPR_DATA])[unix.NFTA_IMMEDIATE_DATA])
		if chain := attributes(data[unix.NFTA_DATA_VERDICT])[unix.NFTA_VERDICT_CHAIN]; chain != nil {
			return cString(chain)
		}
	}
	return ""
}

// attributes are netlink attributes by their type.
func attributes(b []byte) map[uint16][]byte {
	all := map[uint16][]byte{}
	for kind, value := range nested(b) {
		all[kind] = value
	}
	return all
}

// nested are netlink attributes in their order. What is malformed ends them.
func nested(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		list, err := nl.ParseRouteAttr(b)
		if err != nil {
			return
		}
		for _, a := range list {
			if !yield(a.Attr.Type&nl.NLA_TYPE_MASK, a.Value) {
				return
			}
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
	for _, table := range tables {
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
	for _, left := range x.leftovers(table, p) {
		if left.Stays != "" {
			x.log.Warn("kube-proxy's chain stays", "leftover", left.String())
		}
	}
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
