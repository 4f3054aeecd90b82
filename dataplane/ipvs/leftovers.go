package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/ipvs"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// leftovers is what this data plane, in whatever process and with whatever Options, has left in a network namespace. To
// look for it loads no module and makes no table.
type leftovers struct {
	*Plane
	tables []*table // those that exist
	tx     nft.Transaction
	shared bool // kube-proxy has what has addresses, too
}

// look makes a plane that is not asked to program anything.
func look(c dataplane.Config) (*Plane, error) {
	c.Log = c.Logger()
	p := &Plane{config: c}
	if err := p.openQuietly(); err != nil {
		return nil, errors.Join(fmt.Errorf("ipvs: %w", err), p.Close())
	}
	return p, nil
}

// findRemains does something about what is left in the network namespace of the calling thread.
func withLeftovers(c dataplane.Config, f func(*leftovers) error) error {
	p, err := look(c)
	if err != nil {
		return err
	}
	r, err := p.leftovers()
	if err == nil {
		err = f(r)
	}
	if err != nil {
		err = fmt.Errorf("ipvs: %w", err)
	}
	return errors.Join(err, p.Close())
}

func (p *Plane) leftovers() (*leftovers, error) {
	r := &leftovers{Plane: p}
	if err := r.locals.loadAll(); err != nil {
		return nil, err
	}
	for _, t := range newTables(p.config.Mark, &r.tx) {
		err := p.load(t)
		if errors.Is(err, unix.EINVAL) { // a kernel without nf_tables
			return r, nil
		}
		if err != nil {
			return nil, err
		}
		if t.Exists {
			r.tables = append(r.tables, t)
		}
	}
	return r, nil
}

func (r *leftovers) none() bool {
	return len(r.tables)+len(r.locals.held) == 0 && r.locals.dummy.link == nil
}

// servers are the virtual servers that are left, in the order in which they go.
func (r *leftovers) servers() (ours []ipvs.Key, err error) {
	if r.none() {
		return nil, nil
	}
	if r.client == nil {
		if _, err := os.Stat("/proc/thread-self/net/ip_vs"); err != nil {
			return nil, nil
		}
		if r.client, err = openClient(r.config.Inject); err != nil {
			return nil, err
		}
	}
	all, err := r.client.Servers()
	for key := range all {
		if r.owns(key) {
			ours = append(ours, key)
		}
	}
	slices.SortFunc(ours, backwards)
	return ours, err
}

func (r *leftovers) owns(key ipvs.Key) bool {
	for _, t := range r.tables {
		if t.Family.V6() == key.V6 && key.Mark == 0 && t.recorded(key) {
			return true
		}
	}
	return key.Mark&markMask == markBits
}

// clear deletes everything, whoever uses it: the record of what is ours goes last.
func (r *leftovers) clear() error {
	keys, err := r.servers()
	if err != nil {
		return err
	}
	if err := r.clearLocals(); err != nil {
		return err
	}
	if r.shared {
		keys = slices.DeleteFunc(keys, func(key ipvs.Key) bool { return key.Mark == 0 })
	}
	if err := r.perform(deletions(keys)); err != nil {
		return err
	}
	r.tx = nft.Transaction{}
	for _, t := range r.tables {
		t.Delete()
	}
	return r.ruleset.Commit(&r.tx)
}

func (r *leftovers) clearLocals() error {
	if r.shared {
		return errors.Join(r.locals.routes.clear(), r.locals.dummy.release())
	}
	return r.locals.clear()
}

func (r *leftovers) perform(requests []ipvs.Request) error {
	if len(requests) == 0 {
		return nil
	}
	refused, err := r.client.perform(requests)
	return errors.Join(append(refused, err)...)
}

// inspect tells what this data plane, with whatever Options, has left in the network namespace of the calling thread.
func inspect() (l dataplane.Leftover, err error) {
	err = withLeftovers(dataplane.Config{}, func(r *leftovers) error {
		l.Rules = !r.none()
		l.Retired = l.Rules && !slices.ContainsFunc(r.tables, (*table).decides)
		return nil
	})
	return l, err
}

// handBack is for a node where kube-proxy is back in mode ipvs: it deletes what is not kube-proxy's as well. The
// virtual servers of addresses and the interface kube-ipvs0 stay, with their connections. kube-proxy deletes what no
// Service has any more.
func handBack(_ context.Context, c dataplane.Config) error {
	return withLeftovers(c, func(r *leftovers) error {
		r.shared = true
		return r.clear()
	})
}

// drainLeft is for when another data plane is in force. IPVS takes nothing new, and goes on with the connections
// that it has; the result is how many. When it is called again and there are none, it does what Remove does.
func drainLeft(_ context.Context, c dataplane.Config) (connections int, err error) {
	err = withLeftovers(c, func(r *leftovers) (err error) {
		if connections, err = r.startDraining(); err == nil && connections == 0 {
			err = r.clear()
		}
		return err
	})
	return connections, err
}

// startDraining empties the tables but for the record of our virtual servers and what closes local addresses, and gives
// all real servers weight 0. A virtual server that still served counts as one connection at least, so that the caller
// looks again.
func (r *leftovers) startDraining() (connections int, err error) {
	keys, err := r.servers()
	if err != nil {
		return 0, err
	}
	for _, t := range r.tables {
		if err := t.hollow(); err != nil {
			return 0, err
		}
	}
	if err := r.ruleset.Commit(&r.tx); err != nil {
		return 0, err
	}
	var requests []ipvs.Request
	for _, key := range keys {
		destinations, err := r.client.Destinations(key)
		if err != nil {
			return 0, err
		}
		n, serves := 0, false
		for _, have := range destinations {
			n += int(have.Connections)
			if have.Weight != 0 {
				serves = true
				requests = append(requests, ipvs.NewRequest(ipvs.SetDestination, key, ipvs.Destination{Addr: have.Addr}, nil))
			}
		}
		if n == 0 && !serves {
			requests = append(requests, ipvs.DeleteServer(key, nil))
		}
		if serves { // then a client may have come since
			n = max(n, 1)
		}
		connections += n
	}
	return connections, r.perform(requests)
}

// closing are the chains of a table while connections drain. Addresses that are local for IPVS stay so for its
// connections. The node's own sockets listen there, too, and no Service has a say about their ports any more. So a new
// connection is refused that neither IPVS nor the plane in force has taken.
func (t *table) closing() []nft.Chain {
	refuse := nft.NewRule("addresses that are local for IPVS only",
		t.Family.Load(t.Family.Destination, 0), nft.In(t.Sets[localAddresses].Name),
		is(expr.CtStateBitNEW), t.notTaken(), nft.GoTo(nft.ChainReject))
	rules := []nft.Rule{refuse}
	if t.FoundSets[t.Sets[healthChecks].Name] { // a version before had none
		rules = append([]nft.Rule{t.healthChecks()}, rules...)
	}
	return []nft.Chain{t.RejectChain(), inputAfterIPVS(rules...)}
}

// decides reports whether a table has chains that decide about new connections to Services.
func (t *table) decides() bool {
	for name := range t.Chains {
		if !slices.ContainsFunc(t.closing(), func(c nft.Chain) bool { return c.Name == name }) {
			return true
		}
	}
	return false
}

// hollow leaves nothing of a table but the record of which virtual servers are ours, and what closes their addresses.
func (t *table) hollow() error {
	if !t.decides() {
		return nil
	}
	t.Flush("")
	for name := range t.Chains {
		t.Chains[name] = nil
	}
	for name := range t.FoundSets {
		if !slices.Contains([]string{
			t.Sets[virtualServers].Name, t.Sets[localAddresses].Name, t.Sets[healthChecks].Name,
		}, name) {
			t.Tx.Join()
			t.DeleteSet(name)
		}
	}
	keep := map[string]bool{}
	if t.FoundSets[t.Sets[localAddresses].Name] {
		for _, c := range t.closing() {
			t.Tx.Join()
			if err := t.SetChain(c); err != nil {
				return err
			}
			keep[c.Name] = true
		}
	}
	for name := range t.Chains {
		if !keep[name] {
			t.Tx.Join()
			t.DeleteChain(name)
		}
	}
	return nil
}

// Owns tells, in the network namespace of the calling thread, which virtual servers are of this data plane: some of
// them may have been others'.
func Owns() (owns func(a netip.AddrPort, protocol uint8) bool, err error) {
	err = withLeftovers(dataplane.Config{}, func(r *leftovers) error {
		owns = func(a netip.AddrPort, protocol uint8) bool {
			return r.owns(ipvs.Key{Addr: a.Addr(), Port: a.Port(), Protocol: model.Protocol(protocol), V6: a.Addr().Is6()})
		}
		return nil
	})
	return owns, err
}
