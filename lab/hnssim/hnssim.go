// Package hnssim simulates the Host Networking Service of Windows on any system: it holds JSON documents, and refuses
// those that the real one refuses.
//
//	hns.HNS ──────────────► Client ─┐
//	computenetwork.dll (Wine) ──────┴─ Do(call) ─► Service ─► Reach: backends of a packet
//
// The simulator knows of HNS only its documents, reports of failures, and how kube-proxy meets them. Its treatment of
// packets is a reading of these documents; no real Windows was at hand.
package hnssim

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"fairlead.dev/fairlead/dataplane/kernelspace/hns"
	"fairlead.dev/fairlead/model"
)

// Verb is what a call does.
type Verb string

// Kind is what a call does it with.
type Kind string

// The verbs and kinds of calls.
const (
	Enumerate Verb = "enumerate" // Document is HNS's query, or empty; the answer is a list of ids
	Query     Verb = "query"
	Create    Verb = "create" // ID is the network's, of an endpoint
	Modify    Verb = "modify"
	Delete    Verb = "delete"

	Networks      Kind = "network"
	Endpoints     Kind = "endpoint"
	LoadBalancers Kind = "load balancer"
)

// A Call is one request to the service.
type Call struct {
	Verb     Verb
	Kind     Kind
	ID       string
	Document json.RawMessage
}

func (c Call) String() string { return string(c.Kind) + " " + string(c.Verb) }

// A Service is what calls are made to. It may be used by several goroutines.
type Service struct {
	mu      sync.Mutex
	version hns.Version
	next    int
	tables  map[Kind]map[string]json.RawMessage
	taken   map[string]string // addresses and frontends, each with the id of the one object that has it
	users   map[string]int    // how many load balancers an endpoint has
	network map[string]string // the network of an endpoint
	calls   []Call
	fault   func(Call) error
}

// New is a service without objects.
func New(v hns.Version) *Service {
	s := &Service{version: v}
	s.Restart()
	return s
}

// Restart loses all objects, as the real service does when it starts anew; the network plugin makes its own again.
func (s *Service) Restart() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tables = map[Kind]map[string]json.RawMessage{Networks: {}, Endpoints: {}, LoadBalancers: {}}
	s.taken, s.users, s.network = map[string]string{}, map[string]int{}, map[string]string{}
}

// Version is that of the service.
func (s *Service) Version() hns.Version { return s.version }

// Fail has calls fail for which f returns an error, before they do anything. Nil: no call fails.
func (s *Service) Fail(f func(Call) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fault = f
}

// Calls are those that were made since the last time.
func (s *Service) Calls() []Call {
	s.mu.Lock()
	defer s.mu.Unlock()
	calls := s.calls
	s.calls = nil
	return calls
}

// Do makes a call. The answer of Create and Query is the document, with its ID.
func (s *Service) Do(c Call) (json.RawMessage, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls = append(s.calls, c)
	if s.fault != nil {
		if err := s.fault(c); err != nil {
			return nil, err
		}
	}
	table, ok := s.tables[c.Kind]
	if !ok {
		return nil, hns.ErrMissing
	}
	c.ID = strings.ToUpper(c.ID)
	switch c.Verb {
	case Enumerate:
		return s.enumerate(c.Kind, c.Document)
	case Create:
		return s.create(c)
	}
	document, ok := table[c.ID]
	switch {
	case !ok:
		return nil, hns.ErrNotFound
	case c.Verb == Query:
		return document, nil
	case c.Verb == Delete:
		return nil, s.delete(c)
	case c.Verb != Modify || c.Kind != LoadBalancers || !s.version.Features().Modify:
		return nil, hns.ErrMissing
	}
	return s.put(c.Kind, c.ID, c.Document)
}

// enumerate answers with the ids of those documents of which the query's filter is true: that of an id, of a name, or
// of a network.
func (s *Service) enumerate(k Kind, query json.RawMessage) (json.RawMessage, error) {
	var q struct{ Filter string }
	var filter struct{ ID, Name, VirtualNetwork, HostComputeNetwork string } // VirtualNetwork is the older name
	if len(query) > 0 && json.Unmarshal(query, &q) != nil ||
		q.Filter != "" && json.Unmarshal([]byte(q.Filter), &filter) != nil {
		return nil, hns.ErrInvalid
	}
	network := cmp.Or(filter.HostComputeNetwork, filter.VirtualNetwork)
	ids := []string{}
	for id, document := range s.tables[k] {
		if filter.ID != "" && !strings.EqualFold(filter.ID, id) {
			continue
		}
		if network != "" && !strings.EqualFold(s.network[id], network) {
			continue
		}
		if filter.Name != "" {
			if o, _ := read[struct{ Name string }](document); !strings.EqualFold(o.Name, filter.Name) {
				continue
			}
		}
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return json.Marshal(ids)
}

func (s *Service) create(c Call) (json.RawMessage, error) {
	s.next++
	id := fmt.Sprintf("%08X-0000-4000-8000-%012X", s.next, s.next)
	if c.Kind == Endpoints {
		if _, ok := s.tables[Networks][c.ID]; !ok {
			return nil, hns.ErrNoNetwork
		}
		fields := map[string]json.RawMessage{}
		if err := json.Unmarshal(c.Document, &fields); err != nil {
			return nil, hns.ErrInvalid
		}
		fields["HostComputeNetwork"], _ = json.Marshal(c.ID)
		c.Document, _ = json.Marshal(fields)
		s.network[id] = c.ID
	}
	return s.put(c.Kind, id, c.Document)
}

// put stores a document if HNS would.
func (s *Service) put(k Kind, id string, document json.RawMessage) (json.RawMessage, error) {
	fields := map[string]json.RawMessage{}
	if err := json.Unmarshal(document, &fields); err != nil {
		return nil, hns.ErrInvalid
	}
	fields["ID"], _ = json.Marshal(id)
	document, err := json.Marshal(fields)
	if err != nil {
		return nil, err
	}
	now, err := s.claim(k, document)
	if err != nil {
		return nil, err
	}
	for _, one := range now.takes {
		if other, ok := s.taken[one]; ok && other != id {
			return nil, now.refusal
		}
	}
	s.release(k, id)
	for _, one := range now.takes {
		s.taken[one] = id
	}
	for _, e := range now.uses {
		s.users[e]++
	}
	s.tables[k][id] = document
	return document, nil
}

// claim is what a document wants of the service.
type claim struct {
	takes   []string  // addresses or frontends: only one object may have each
	refusal hns.Error // if another one has it
	uses    []string  // ids of endpoints
}

// claim is that of a document. The service refuses what its version cannot do, and endpoints that do not exist.
func (s *Service) claim(k Kind, document json.RawMessage) (c claim, err error) {
	switch k {
	case Endpoints:
		e, err := read[hns.Endpoint](document)
		if err != nil || len(e.IPConfigurations) == 0 {
			return c, hns.ErrInvalid
		}
		// Versions are known that have a remote endpoint and a local one of the same address.
		for _, ip := range e.IPConfigurations {
			c.takes = append(c.takes, fmt.Sprint(e.Network, e.Flags&hns.Remote, ip.Address))
		}
		c.refusal = hns.ErrExists
	case LoadBalancers:
		b, err := read[hns.LoadBalancer](document)
		if err != nil || !s.can(&b) {
			return c, hns.ErrInvalid
		}
		for _, e := range b.Endpoints {
			e = strings.ToUpper(e)
			if _, ok := s.tables[Endpoints][e]; !ok {
				return c, hns.ErrNoEndpoint
			}
			c.uses = append(c.uses, e)
		}
		c.takes, c.refusal = frontends(&b), hns.ErrExists
		if len(b.FrontendVIPs) == 0 {
			c.refusal = hns.ErrPortInUse
		}
	}
	return c, nil
}

// can reports whether the version has what a load balancer asks for.
func (s *Service) can(b *hns.LoadBalancer) bool {
	f := s.version.Features()
	return len(b.PortMappings) > 0 && len(b.Endpoints) > 0 && (b.Flags&hns.DSR == 0 || f.DSR) &&
		(b.Flags&hns.IPv6 == 0 || f.DualStack) && (b.PortMappings[0].DistributionType != hns.SourceIP || f.Affinity)
}

// frontends are the addresses, ports and protocols of a load balancer.
func frontends(b *hns.LoadBalancer) (all []string) {
	vips := b.FrontendVIPs
	if len(vips) == 0 {
		vips = []string{"node"}
	}
	for _, vip := range vips {
		for _, m := range b.PortMappings {
			all = append(all, fmt.Sprint(vip, " ", m.ExternalPort, " ", m.Protocol, " ", b.Flags&hns.IPv6))
		}
	}
	return all
}

// release gives back what an object has, if there is one.
func (s *Service) release(k Kind, id string) {
	if old, ok := s.tables[k][id]; ok {
		was, _ := s.claim(k, old)
		for _, one := range was.takes {
			delete(s.taken, one)
		}
		for _, e := range was.uses {
			s.users[e]--
		}
	}
}

func (s *Service) delete(c Call) error {
	if s.users[c.ID] > 0 {
		return hns.ErrInUse
	}
	s.release(c.Kind, c.ID)
	delete(s.network, c.ID)
	delete(s.tables[c.Kind], c.ID)
	return nil
}

func read[T any](document json.RawMessage) (T, error) {
	var v T
	err := json.Unmarshal(document, &v)
	return v, err
}

// Lines are all objects but networks, one a line, sorted, with addresses in place of ids: equal services have equal
// lines.
func (s *Service) Lines() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	address := map[string]string{}
	var lines []string
	for id, d := range s.tables[Endpoints] {
		e, _ := read[hns.Endpoint](d)
		where := "local"
		if e.Flags&hns.Remote != 0 {
			where = "remote"
		}
		var ips []string
		for _, c := range e.IPConfigurations {
			ips = append(ips, c.Address)
		}
		address[id] = strings.Join(ips, ",")
		line := fmt.Sprintf("endpoint %s %s mac %s", address[id], where, strings.ToLower(e.MACAddress))
		for _, p := range e.Policies {
			line += fmt.Sprintf(" %s %s", p.Type, p.Settings)
		}
		lines = append(lines, line)
	}
	for _, d := range s.tables[LoadBalancers] {
		b, _ := read[hns.LoadBalancer](d)
		to := make([]string, 0, len(b.Endpoints))
		for _, e := range b.Endpoints {
			to = append(to, cmp.Or(address[strings.ToUpper(e)], "gone"))
		}
		slices.Sort(to)
		for _, m := range b.PortMappings {
			lines = append(lines, fmt.Sprintf("balancer %s port %d/%d to %d flags %d.%d distribution %d source %s endpoints %s",
				cmp.Or(strings.Join(b.FrontendVIPs, ","), "node"), m.ExternalPort, m.Protocol, m.InternalPort, b.Flags,
				m.Flags, m.DistributionType, cmp.Or(b.SourceVIP, "none"), strings.Join(to, ",")))
		}
	}
	slices.Sort(lines)
	return lines
}

// Answer is what becomes of the packets of new connections.
type Answer struct {
	Backends []netip.AddrPort // sorted; none: no load balancer takes them
	Source   bool             // backends see the client's address
	Sticky   bool             // a client keeps its backend
}

// Reach says where connections to an address and port may go. The node has some addresses.
func (s *Service) Reach(to netip.AddrPort, p model.Protocol, node []netip.Addr) Answer {
	s.mu.Lock()
	defer s.mu.Unlock()
	v6 := uint32(0)
	if to.Addr().Is6() {
		v6 = hns.IPv6
	}
	id, ok := s.taken[fmt.Sprint(to.Addr(), " ", to.Port(), " ", uint32(p), " ", v6)]
	if !ok && slices.Contains(node, to.Addr()) && !to.Addr().IsLoopback() {
		id, ok = s.taken[fmt.Sprint("node ", to.Port(), " ", uint32(p), " ", v6)]
	}
	if !ok {
		return Answer{}
	}
	b, _ := read[hns.LoadBalancer](s.tables[LoadBalancers][id])
	a := Answer{Source: b.Flags&hns.DSR != 0, Sticky: b.PortMappings[0].DistributionType == hns.SourceIP}
	for _, id := range b.Endpoints {
		e, _ := read[hns.Endpoint](s.tables[Endpoints][strings.ToUpper(id)])
		for _, c := range e.IPConfigurations {
			if ip, err := netip.ParseAddr(c.Address); err == nil && ip.Is6() == to.Addr().Is6() {
				a.Backends = append(a.Backends, netip.AddrPortFrom(ip, b.PortMappings[0].InternalPort))
			}
		}
	}
	slices.SortFunc(a.Backends, netip.AddrPort.Compare)
	return a
}

// SetNetwork replaces the document of a network, as the network plugin does.
func (s *Service) SetNetwork(id string, document json.RawMessage) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, _ = s.put(Networks, strings.ToUpper(id), document)
}
