package takeover

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"fairlead.dev/fairlead/internal/ipvs"
)

// virtualServers is what mode ipvs leaves besides rules and sets: virtual servers and kube-ipvs0.
type virtualServers struct {
	Config
	said *Progress // what the log says of draining
}

// ipvsState is what there is of it.
type ipvsState struct {
	servers []server // kube-proxy's
	dummy   *dummy   // nil: none
}

func (v *virtualServers) read() (ipvsState, error) {
	var s ipvsState
	var err error
	if s.dummy, err = findDummy(v.OwnAlias); err != nil {
		return s, err
	}
	all, err := allServers()
	if err != nil || len(all) == 0 {
		return s, err
	}
	nodePorts, err := nodePorts()
	if err != nil {
		return s, err
	}
	excluded, err := v.excluded()
	if err != nil {
		return s, err
	}
	for _, v := range all {
		if s.owns(v, nodePorts) && !excluded(v) {
			s.servers = append(s.servers, v)
		}
	}
	return s, nil
}

// excluded reports whether a virtual server is the caller's, or left alone at the user's wish.
func (v *virtualServers) excluded() (func(server) bool, error) {
	owned := func(netip.AddrPort, uint8) bool { return false }
	if v.Owned != nil {
		var err error
		if owned, err = v.Owned(); err != nil {
			return nil, err
		}
	}
	var excluded []netip.Prefix
	if v.Exclude != nil {
		excluded = v.Exclude()
	}
	return func(s server) bool {
		contains := func(p netip.Prefix) bool { return p.Contains(s.Addr) }
		return owned(netip.AddrPortFrom(s.Addr, s.Port), uint8(s.Protocol)) || slices.ContainsFunc(excluded, contains)
	}, nil
}

// owns reports whether kube-proxy made a virtual server. Then its address is on kube-ipvs0, or its port is in one of
// kube-proxy's ip sets, which stay for that reason until IPVS has drained.
func (s ipvsState) owns(v server, nodePorts map[servedPort]bool) bool {
	if s.dummy != nil {
		if _, ok := s.dummy.addrs[v.Addr]; ok {
			return true
		}
	}
	return nodePorts[servedPort{uint8(v.Protocol), v.Port}]
}

// nodePorts are those in kube-proxy's ip sets.
func nodePorts() (map[servedPort]bool, error) {
	ports := map[servedPort]bool{}
	for _, f := range families {
		existing, err := existingSets(f)
		if err != nil {
			return nil, err
		}
		for name, protocol := range f.nodePortSets() {
			if !slices.Contains(existing, name) {
				continue
			}
			members, err := setPorts(name)
			if err != nil {
				return nil, err
			}
			for _, port := range members {
				ports[servedPort{protocol, port}] = true
			}
		}
	}
	return ports, nil
}

func (v *virtualServers) find(context.Context) ([]Leftover, error) {
	s, err := v.read()
	var found []Leftover
	until := s.dummy.until()
	if len(s.servers) > 0 {
		l := Leftover{Backend: "ipvs", What: "virtual servers", Count: len(s.servers)}
		if s.quiet() { // otherwise kube-proxy has been back
			l.Until = until
		}
		found = append(found, l)
	}
	if s.dummy != nil {
		found = append(found, Leftover{Backend: "link", What: dummyLink, Count: 1, Until: until})
	}
	return found, err
}

// remove ends what IPVS does, or begins to drain it.
func (v *virtualServers) remove(ctx context.Context) error {
	s, err := v.read()
	if err != nil || s.empty() {
		return err
	}
	if s.dummy == nil && v.Drain > 0 { // without addresses nothing reaches IPVS but NodePorts
		v.Log.Info("link kube-ipvs0 is gone: connections through IPVS end now")
	}
	if v.Drain == 0 || s.dummy == nil {
		return s.finish()
	}
	return v.begin(ctx, s)
}

func (s ipvsState) empty() bool    { return len(s.servers) == 0 && s.dummy == nil }
func (s ipvsState) draining() bool { return !s.dummy.until().IsZero() }

// quiet reports whether nothing takes new connections.
func (s ipvsState) quiet() bool {
	return !slices.ContainsFunc(s.servers, func(v server) bool { return !v.quiet() })
}

// begin makes IPVS take nothing new. Its first step then removes what is idle.
func (v *virtualServers) begin(ctx context.Context, s ipvsState) error {
	var errs []error
	if s.dummy.deadline.IsZero() || !s.quiet() { // in the latter case kube-proxy has been back
		errs = append(errs, s.dummy.setDeadline(time.Now().Add(v.Drain).Truncate(time.Second)))
	}
	errs = append(errs, s.dummy.unprefer())
	var requests []ipvs.Request
	for _, server := range s.servers {
		requests = append(requests, server.quiesce()...)
	}
	errs = append(errs, performIPVS(requests))
	_, err := v.step(ctx)
	return errors.Join(append(errs, err)...)
}

// errReturned ends a Drain.
var errReturned = errors.New("kube-proxy is back: its virtual servers of IPVS take new connections again")

// step removes the virtual servers and addresses that no connection uses any more, or all when it is time.
func (v *virtualServers) step(ctx context.Context) (Progress, error) {
	p, err := v.goOn(ctx)
	if err == nil {
		v.say(p)
	}
	return p, err
}

// goOn does one step of draining. It deletes servers without connections, and then the addresses that no server needs
// any more. Once nothing is left, or the deadline has passed, kube-ipvs0 and the ip sets go as well. kube-proxy, if it
// is back, has set weights again: that ends the draining.
func (v *virtualServers) goOn(ctx context.Context) (Progress, error) {
	s, err := v.read()
	if err != nil || !s.draining() {
		return Progress{}, err
	}
	if !s.quiet() {
		return Progress{}, errReturned
	}
	if !time.Now().Before(s.dummy.deadline) {
		return Progress{}, errors.Join(s.finish(), ipSets{}.remove(ctx))
	}
	p := Progress{Deadline: s.dummy.deadline}
	idle := map[netip.Addr]bool{}
	for addr := range s.dummy.addrs {
		idle[addr] = true
	}
	var requests []ipvs.Request
	for _, server := range s.servers {
		n := server.connections()
		if n == 0 {
			requests = append(requests, ipvs.DeleteServer(server.Key, nil))
			continue
		}
		p.Servers, p.Connections = p.Servers+1, p.Connections+n
		delete(idle, server.Addr)
	}
	err = performIPVS(requests)
	kept, dropErr := s.dropAddresses(idle)
	p.Connections += kept
	if err = errors.Join(err, dropErr); p.Servers == 0 && kept == 0 && err == nil {
		return Progress{}, errors.Join(s.dummy.remove(), ipSets{}.remove(ctx))
	}
	return p, err
}

// dropAddresses takes addresses from kube-ipvs0, but those that connections come from, and tells how
// many these are: local processes had the Service's own address for their own.
func (s ipvsState) dropAddresses(idle map[netip.Addr]bool) (kept int, err error) {
	if len(idle) == 0 {
		return 0, nil
	}
	used, err := sourcesIn(s.dummy.addrs)
	if err != nil {
		return 0, err
	}
	var errs []error
	for addr := range idle {
		if used[addr] {
			kept++
			continue
		}
		errs = append(errs, s.dummy.drop(addr))
	}
	return kept, errors.Join(errs...)
}

// finish removes all, even if connections use it.
func (s ipvsState) finish() error {
	var errs []error
	var open map[flow]bool
	if len(s.servers) > 0 {
		all, err := ipvsFlows()
		errs = append(errs, err)
		open = s.through(all)
	}
	var requests []ipvs.Request
	for _, server := range s.servers {
		requests = append(requests, ipvs.DeleteServer(server.Key, nil))
	}
	errs = append(errs, performIPVS(requests))
	if s.dummy != nil {
		errs = append(errs, s.dummy.remove())
	}
	if err := forget(open); err != nil {
		errs = append(errs, fmt.Errorf("forget connections that IPVS served: %w", err))
	}
	return errors.Join(errs...)
}

// through are the flows that go through kube-proxy's servers.
func (s ipvsState) through(all map[flow]bool) map[flow]bool {
	served := map[netip.AddrPort]bool{}
	for _, v := range s.servers {
		served[netip.AddrPortFrom(v.Addr, v.Port)] = true
	}
	flows := map[flow]bool{}
	for f := range all {
		if served[f.assigned] {
			flows[f] = true
		}
	}
	return flows
}
