// Package takeover finds kube-proxy's leftovers in a network namespace, whatever its mode was, and removes them. It is
// called when the rules of a data plane are in force, so that at every moment Services work:
//
//	          our rules are in force
//	                   │
//	Find ──────────────┤   what is there: for people, and for tests
//	Returned ──────────┤   is kube-proxy back?
//	                   ▼
//	Remove ── chains of iptables (legacy, nf_tables) ── nftables tables ── ip sets ── nfacct
//	   │
//	   └── IPVS: weight 0 ──► Drain: wait for its connections ──► virtual servers, kube-ipvs0
//
// Removing rules breaks no connection that they translated: connection tracking remembers the translation. IPVS
// remembers in the real server, so that its servers must outlive their connections. New ones never reach them: they are
// translated in the hooks prerouting and output, before IPVS. IPVS sits in input, and behind the translation in output
// (ip_vs_ops4 in the kernel's net/netfilter/ipvs/ip_vs_core.c).
//
// Objects of kubelet (KUBE-FIREWALL, KUBE-KUBELET-CANARY, KUBE-IPTABLES-HINT, KUBE-MARK-DROP) and of other programs are
// not touched, not even their counters. Looking loads no kernel module and makes no table.
package takeover

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/internal/namespace"
	"fairlead.dev/fairlead/internal/xt"
)

// Config says how to take over.
type Config struct {
	Log *slog.Logger // nil: say nothing
	// Drain is how long connections through IPVS may live on. Zero: not at all, Remove ends them.
	Drain time.Duration
	// KeepForward leaves the chain KUBE-FORWARD where FORWARD lets nothing pass that no rule accepts:
	// open connections, and those to NodePorts, need it there.
	KeepForward bool
	// Spare reports whether the chains of a back end, IPTablesLegacy or IPTablesNFT, are the caller's in the tables
	// nat and filter, whatever their names are. Nil: they are not.
	Spare func(backend string) bool
	// Owned finds out which virtual servers of IPVS are the caller's, although their addresses or ports are those of
	// kube-proxy's: he has adopted them. Nil: none.
	Owned func() (func(a netip.AddrPort, protocol uint8) bool, error)
	// OwnAlias is that of the link kube-ipvs0 when it is the caller's. Empty: it is not.
	OwnAlias string
	// Exclude are addresses whose virtual servers stay as they are. Nil: none.
	Exclude func() []netip.Prefix
}

// The back ends of iptables.
const (
	IPTablesLegacy = "iptables-legacy"
	IPTablesNFT    = "iptables-nft"
)

// Takeover looks at one network namespace. Its methods must not be called concurrently, but for Find and Blocked.
type Takeover struct {
	config Config
	here   namespace.Namespace
	said   Progress           // of draining
	seen   map[string]xt.Info // tables of iptables-legacy without anything of kube-proxy's
}

// Leftover is a group of objects that kube-proxy made.
type Leftover struct {
	Backend string // iptables-legacy, iptables-nft, nftables, ipvs, ipset, nfacct, link
	Family  string // ip, ip6; empty: both or none
	Table   string // of iptables and nftables
	What    string // chains, tables, virtual servers, …
	Count   int
	// Stays says why Remove leaves it where it is, and what to do about it. Empty: Remove removes it.
	Stays string
	// Until is how long Drain leaves it to its connections. Zero: it does not drain.
	Until time.Time
}

// String is for a log or a terminal: "31 chains (iptables-legacy ip nat)".
func (l Leftover) String() string {
	where := l.Backend
	for _, s := range []string{l.Family, l.Table} {
		if s != "" {
			where += " " + s
		}
	}
	what := l.What
	if l.Count == 1 {
		what = strings.TrimSuffix(what, "s")
	}
	s := fmt.Sprintf("%d %s (%s)", l.Count, what, where)
	if l.Stays != "" {
		s += ": " + l.Stays
	}
	if !l.Until.IsZero() {
		s += ": for its connections, until " + l.Until.UTC().Format(time.RFC3339)
	}
	return s
}

// New looks at the network namespace of the calling thread, whichever thread calls the methods.
func New(c Config) (*Takeover, error) {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	here, err := namespace.Here()
	if err != nil {
		return nil, fmt.Errorf("kube-proxy's leftovers: network namespace: %w", err)
	}
	return &Takeover{config: c, here: here, seen: map[string]xt.Info{}}, nil
}

// Close ends nothing in the kernel.
func (t *Takeover) Close() error { return t.here.Close() }

// leftoverKind is one kind of object that kube-proxy leaves.
type leftoverKind interface {
	find(ctx context.Context) ([]Leftover, error)
	// remove may be repeated, and goes on after errors.
	remove(ctx context.Context) error
}

// leftoverKinds come in the order of removal: rules refer to sets and counters, and the sets tell which
// virtual servers are kube-proxy's.
func (t *Takeover) leftoverKinds() []leftoverKind {
	var kinds []leftoverKind
	kept := &kept{wanted: t.config.KeepForward}
	for _, f := range families {
		kinds = append(kinds,
			&legacy{family: f, log: t.config.Log, kept: kept, tables: t.tables(IPTablesLegacy)},
			&compat{nfTables: nfTables{family: f}, kept: kept, tables: t.tables(IPTablesNFT)}, &native{nfTables{family: f}})
	}
	return append(kinds, t.servers(), ipSets{}, accounting{kept})
}

// tables are those of a back end in which chains can be kube-proxy's.
func (t *Takeover) tables(backend string) []string {
	if t.config.Spare == nil || !t.config.Spare(backend) {
		return tables
	}
	return slices.DeleteFunc(slices.Clone(tables), func(t string) bool { return t == "nat" || t == filterTable })
}

func (t *Takeover) servers() *virtualServers {
	return &virtualServers{Config: t.config, said: &t.said}
}

// Find tells what Remove would remove, what drains, and what stays and why.
func (t *Takeover) Find(ctx context.Context) ([]Leftover, error) {
	var found []Leftover
	err := t.here.Do(func() error {
		var errs []error
		for _, x := range t.leftoverKinds() {
			some, err := x.find(ctx)
			found, errs = append(found, some...), append(errs, err)
		}
		return errors.Join(errs...)
	})
	return found, err
}

// Remove removes everything that can go at once. If Config.Drain allows for it, IPVS goes on with the connections that
// it has. Then either Drain waits for their end, or Remove is called now and then, which also copes with a kube-proxy
// that is back. Find lists what stays. An error does not keep the rest from being removed.
func (t *Takeover) Remove(ctx context.Context) error {
	return t.here.Do(func() error {
		var errs []error
		for _, x := range t.leftoverKinds() {
			errs = append(errs, x.remove(ctx))
		}
		return errors.Join(errs...)
	})
}
