package advise

import (
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// firstPort and serverPorts are where the server of a scratch cluster listens. A pool to which connections are made
// keeps its number of backends, up to serverPorts.
const (
	firstPort   = 20000
	serverPorts = 8
)

// targetPort is that of the Service which is added where the node has none to which a client of a pod could connect.
const targetPort = 80

// sample are rows for a scratch cluster: those of some of the node's Services, evenly chosen. Only a few of them are
// changed: the targets lead to the server there.
type sample struct {
	state    *model.State
	services int
	targets  []model.Key
	// there and back are changes of an endpoint of a target, as they come all the time; changed is state with the first.
	there, back model.Change
	changed     *model.State
}

// newSample takes at most so many Services; all of a node's address ranges of pods are those of the scratch cluster.
func newSample(s *model.State, most int) *sample {
	kept := evenly(slices.Sorted(maps.Keys(namesOf(s))), most)
	p := &sample{state: model.NewState(), services: len(kept)}
	p.state.Pods = model.Pods{Prefixes: model.Disjoint(testbed.ClusterCIDRs())}
	for k, f := range s.Frontends {
		if kept[f.Service] && !taken(netip.PrefixFrom(k.Addr, k.Addr.BitLen())) {
			p.state.Frontends[k] = f
			if f.Verdict == model.Forward {
				p.state.Pools[f.Pool] = s.Pools[f.Pool]
			}
		}
	}
	for prefix, verdict := range s.Guards {
		if !taken(prefix) {
			p.state.Guards[prefix] = verdict
		}
	}
	p.chooseTargets()
	p.prepareChange()
	return p
}

func namesOf(s *model.State) map[string]bool {
	all := make(map[string]bool, len(s.Frontends))
	for _, f := range s.Frontends {
		all[f.Service] = true
	}
	return all
}

// evenly are at most so many of all names, the first and the last among them.
func evenly(names []string, most int) map[string]bool {
	kept := make(map[string]bool, min(len(names), most))
	if len(names) <= most {
		for _, name := range names {
			kept[name] = true
		}
		return kept
	}
	for i := range most {
		kept[names[i*(len(names)-1)/max(most-1, 1)]] = true
	}
	return kept
}

// taken reports whether an address is one of the scratch cluster's own.
func taken(p netip.Prefix) bool {
	return slices.ContainsFunc(testbed.OwnCIDRs(), p.Overlaps)
}

// chooseTargets has three Services lead to the server: the first, the last, and one between them.
func (p *sample) chooseTargets() {
	var all []model.Key
	for k, f := range p.state.Frontends {
		if k.Protocol == model.TCP && f.Verdict == model.Forward && f.Allow == nil && !nodePort(k.Port) && !p.shadowed(k) {
			all = append(all, k)
		}
	}
	if len(all) == 0 {
		all = append(all, p.add())
	}
	slices.SortFunc(all, model.Key.Compare)
	p.targets = []model.Key{all[0], all[len(all)-1], all[rand.N(len(all))]}
	slices.SortFunc(p.targets, model.Key.Compare)
	p.targets = slices.Compact(p.targets)
	for _, k := range p.targets {
		p.lead(p.state.Frontends[k].Pool)
	}
}

// nodePort reports whether a port is probably open on addresses of nodes, to which no packet of a scratch cluster is
// routed.
func nodePort(port uint16) bool { return port >= 30000 && port < 32768 }

// shadowed reports whether pods find another row at that address and port.
func (p *sample) shadowed(k model.Key) bool {
	k.Scope = model.Internal
	_, ok := p.state.Frontends[k]
	return ok
}

// add makes a Service.
func (p *sample) add() model.Key {
	k := model.Key{Addr: testbed.LoadBalancerCIDRs()[0].Addr().Next(), Port: targetPort, Protocol: model.TCP}
	id := model.PoolID{Service: "fairlead/scratch:"}
	p.state.Frontends[k] = model.Frontend{Service: id.Service, Verdict: model.Forward, Pool: id}
	p.state.Pools[id] = model.Pool{Backends: make([]model.Backend, 1)}
	return k
}

// lead replaces the backends of a pool.
func (p *sample) lead(id model.PoolID) {
	pool := p.state.Pools[id]
	n := min(len(pool.Serving()), serverPorts)
	pool.Backends = make([]model.Backend, max(n, 1))
	for i := range pool.Backends {
		pool.Backends[i] = backend(id.V6, i)
	}
	p.state.Pools[id] = pool
}

func backend(v6 bool, i int) model.Backend {
	to := netip.AddrPortFrom(serverAddr(v6), firstPort+uint16(i))
	return model.Backend{Addr: to.Addr(), Port: to.Port(), Local: true, Weight: 1}
}

// serverAddr is the address of the server of a scratch cluster.
func serverAddr(v6 bool) netip.Addr {
	a := testbed.PodCIDRs(testbed.Node)[0].Addr().Next().Next()
	if v6 {
		return testbed.EmbedV6(a)
	}
	return a
}

// prepareChange has a pool gain a backend, and lose it again.
func (p *sample) prepareChange() {
	id := p.state.Frontends[p.targets[0]].Pool
	p.changed = p.state.Clone()
	pool := p.changed.Pools[id]
	pool.Backends = append(slices.Clone(pool.Backends), backend(id.V6, len(pool.Backends)))
	p.changed.Pools[id] = pool
	p.there, p.back = model.Diff(p.state, p.changed), model.Diff(p.changed, p.state)
}
