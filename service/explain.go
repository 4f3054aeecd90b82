package service

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/model"
)

// Explanation says what happens to the first packet of a connection, and why. Its parts are for
// people: they have no grammar beyond what String prints.
type Explanation struct {
	Source      string     `json:"source"`
	Interface   string     `json:"interface,omitempty"` // empty: a process of this node
	Assumed     bool       `json:"-"`                   // the Interface was not asked about
	Destination string     `json:"destination"`         // address:port/protocol
	Verdict     string     `json:"verdict"`             // forward, reject, drop, or pass: no concern of ours
	Row         string     `json:"row,omitempty"`       // the row that decides, in canonical text
	Service     string     `json:"service,omitempty"`   // namespace/name:port
	Summary     string     `json:"summary"`             // what happens, in one sentence
	Reasons     []string   `json:"reasons"`             // sentences, in the order in which they decide
	Backends    []Chance   `json:"backends,omitempty"`
	Excluded    []Excluded `json:"excluded,omitempty"` // endpoints that get no new connection
}

// MarshalJSON has the keys of the release before, too.
func (x Explanation) MarshalJSON() ([]byte, error) {
	type plain Explanation
	return json.Marshal(struct {
		plain
		LeftOut []Excluded `json:"leftOut,omitempty"`
	}{plain(x), x.Excluded})
}

// Chance is a backend that the connection may reach.
type Chance struct {
	Backend     string  `json:"backend"`
	Node        string  `json:"node,omitempty"`
	Probability float64 `json:"probability"`
	Masquerade  bool    `json:"masquerade"` // the backend sees the node's address in place of the client's
}

// Excluded is an endpoint that the connection cannot reach.
type Excluded struct {
	Endpoint string `json:"endpoint"`
	Node     string `json:"node,omitempty"`
	Object   string `json:"object"` // the EndpointSlice or Endpoints that has it
	Rule     string `json:"rule"`   // one word: terminating, not-ready, not-local, node-hint, zone-hint, …
	Reason   string `json:"reason"` // the same for people
}

// Explain says what the State means for a packet. A packet without a source, or with one of the
// node's own addresses, is sent by a process of the node. Explain reads the Table's objects and
// changes nothing.
func (t *Table) Explain(p model.Packet) Explanation {
	p = t.fromNode(p)
	d := t.state.Lookup(p)
	x := &explainer{t: t, packet: p, decision: d, claim: claim{p.Destination.Addr(), p.Destination.Port(), p.Protocol}}
	x.out = Explanation{
		Interface:   p.Interface,
		Destination: fmt.Sprintf("%s/%s", p.Destination, p.Protocol),
		Verdict:     d.Verdict.String(),
	}
	if p.Source.IsValid() { // else it is this node, whose addresses are not known
		x.out.Source = p.Source.String()
	}
	health, ok := t.state.Health[x.claim.addrPort()]
	switch {
	case d.Key.Port != 0:
		x.frontend()
	case ok && p.Protocol == model.TCP:
		x.health(health)
	default:
		x.noRow()
	}
	x.out.Summary = x.summary()
	return x.out
}

// summary says what happens to the packet in one sentence.
func (x *explainer) summary() string {
	switch n := len(x.out.Backends); {
	case x.decision.Verdict == model.Forward && n == 1:
		return fmt.Sprintf("Service %s answers, from %s.", x.out.Service, x.out.Backends[0].Backend)
	case x.decision.Verdict == model.Forward:
		return fmt.Sprintf("Service %s answers, from one of %d backends.", x.out.Service, n)
	case x.decision.Verdict == model.Reject:
		return fmt.Sprintf("The connection is refused: %s.", x.because)
	case x.decision.Verdict == model.Drop:
		return fmt.Sprintf("No answer comes, and the client waits: %s.", x.because)
	}
	if strings.HasPrefix(x.out.Row, "health ") {
		return "This process answers, as a health check of load balancers."
	}
	return fmt.Sprintf("The packet passes: %s.", cmp.Or(x.because, "no Service that is served here takes it"))
}

// explainer fills an Explanation.
type explainer struct {
	t        *Table
	packet   model.Packet
	decision model.Decision
	claim    claim
	because  string // the reason for a verdict other than forward
	out      Explanation
}

// decide is say, for the reason that decides.
func (x *explainer) decide(format string, args ...any) {
	x.because = fmt.Sprintf(format, args...)
	x.say("%s", x.because)
}

func (x *explainer) say(format string, args ...any) {
	x.out.Reasons = append(x.out.Reasons, fmt.Sprintf(format, args...))
}

// frontend explains a packet that a row takes.
func (x *explainer) frontend() {
	row := x.t.state.Frontends[x.decision.Key]
	x.out.Row = fmt.Sprintf("frontend %s %s", x.decision.Key, row)
	x.out.Service = row.Service
	e, at := x.owner()
	if x.decision.NotAllowed {
		x.decide("spec.loadBalancerSourceRanges does not have %s, only: %s", x.packet.Source, list(row.Allow))
		return
	}
	if row.Allow != nil {
		x.say("spec.loadBalancerSourceRanges has %s", x.packet.Source)
	}
	if at.port == nil { // HNS leads these connections to the node itself; see compiler.healthVIPs
		x.say("this node answers, as a health check of load balancers")
		return
	}
	s := choose(&x.t.view, e.service, e.service.pool(at.port, at.Addr()),
		x.t.view.gather(nil, at.port, current(e.slices), at.Addr().Is4()))
	pool := x.pool(e.service, at, &s)
	for i := range s.candidates {
		x.candidate(&s, i, pool)
	}
	if x.decision.Verdict == model.Forward {
		x.snat(at, row)
		x.affinity(e.service)
		x.scheduler(e.service)
	}
}

// owner names the Service that has the address and port, and those that want it too.
func (x *explainer) owner() (*entry, address) {
	entries := x.t.wanted(x.claim)
	at := x.t.view.find(entries[0].service, x.claim)
	x.say("%s is the %s of Service %s", x.claim, at.kind, entries[0].service.Name)
	for _, e := range entries[1:] {
		if other, _ := e.wants(x.claim); rightOf(at.kind) < rightOf(other) {
			x.say("Service %s wants it too, as its %s, which comes after what the cluster gives out", e.service.Name, other)
			continue
		}
		x.say("Service %s wants it too, but came later (by creationTimestamp, then name)", e.service.Name)
	}
	return entries[0], at
}

// health explains a packet to a health check server.
func (x *explainer) health(h model.Health) {
	x.out.Row = fmt.Sprintf("health %s %s local %d", x.claim.addrPort(), h.Service, h.Local)
	x.owner()
	x.say("this process answers; ready endpoints on this node: %d", h.Local)
}

// pool explains which endpoints the packet's client may reach, and what happens if there are none.
func (x *explainer) pool(service *Service, at address, s *selection) int {
	variants := service.variants(nil, &x.t.view, at)
	pool := variants[len(variants)-1].pool // of clients from outside
	if s.serving[clusterPool] == 0 || x.decision.Key.Scope == model.Internal {
		pool = clusterPool
	}
	policy := "externalTrafficPolicy"
	if at.kind == model.ClusterIP {
		policy = "internalTrafficPolicy"
	}
	switch {
	case len(s.candidates) == 0:
		x.decide("%s", cmp.Or(unserved(at.port, x.t.entries[service.Name].slices), "it has no endpoints"))
	case s.serving[clusterPool] == 0:
		x.decide("none of its endpoints can serve")
	case x.decision.Key.Scope == model.Internal && service.ExternalLocal:
		x.say("externalTrafficPolicy Local does not hold for this node and its pods: they reach all endpoints")
	case pool == localPool && s.serving[localPool] == 0:
		x.decide("%s is Local, and no endpoint on this node can serve", policy)
	case pool == localPool:
		x.say("%s is Local: only endpoints on this node", policy)
	}
	if hints := s.hints.String(); hints != "" && pool == clusterPool {
		x.say("%s", hints)
	}
	if n := s.fresh(pool); n > 0 {
		x.say("%d of the endpoints are new: their shares grow (annotation %s)", n, slowAnnotation)
	}
	return pool
}

// candidate puts an endpoint where it belongs.
func (x *explainer) candidate(s *selection, i, pool int) {
	c := &s.candidates[i]
	if c.use[pool] == serves {
		x.out.Backends = append(x.out.Backends, Chance{
			Backend:     c.AddrPort.String(),
			Node:        c.endpoint.Node.String(),
			Probability: float64(s.weight(c, pool)) / float64(s.serving[pool]),
			Masquerade:  x.decision.Masquerade(model.Backend{Addr: c.Addr(), Port: c.Port(), Local: s.local(c)}),
		})
		return
	}
	x.out.Excluded = append(x.out.Excluded, Excluded{
		c.AddrPort.String(), c.endpoint.Node.String(), c.slice.object(), c.use[pool].String(), c.reason(pool),
	})
}

// reason says in words why an endpoint gets no new connection from a pool.
func (c *candidate) reason(pool int) string {
	switch c.use[pool] {
	case drains:
		return "terminates, and others are ready; it keeps the UDP flows it has"
	case noWeight:
		return "has weight 0 by annotation: it takes no new connections"
	case notReady:
		if c.endpoint.Terminating {
			return "terminates and does not serve any more"
		}
		return "is not ready"
	case notLocal:
		return "is not on this node"
	case otherNode:
		return "its hints are for other nodes: " + strings.Join(c.endpoint.Hints.Nodes, ", ")
	case otherZone:
		return "its hints are for other zones: " + strings.Join(c.endpoint.Hints.Zones, ", ")
	case serviceAddress:
		return "is an address of a Service, which would make a loop"
	case otherPort:
		return "serves at another target port than the one that HNS takes"
	case nodeAddress:
		return "is an address of this node, for which HNS has no endpoint"
	case duplicate:
		return "another endpoint has the same address and port"
	case ejected:
		return fmt.Sprintf("is ejected: %s, while others answered; it is tried again at %s", c.known,
			c.known.until.UTC().Format(time.TimeOnly+"Z"))
	}
	return ""
}

// snat explains whose address the backend sees.
func (x *explainer) snat(at address, row model.Frontend) {
	const replaced = "the backend sees the node's address: "
	switch masquerade := x.decision.Masquerade(model.Backend{}); {
	case !masquerade && slices.ContainsFunc(x.out.Backends, func(c Chance) bool { return c.Masquerade }):
		x.say("the backend sees the client's address, unless it is the client (hairpin)")
	case !masquerade:
		x.say("the backend sees the client's address")
	case row.SNAT == model.OffCluster && x.packet.Interface == "":
		x.say(replaced + "the client is this node, not a pod")
	case row.SNAT == model.OffCluster:
		x.say(replaced + "the client is not recognised as a pod (detectLocalMode)")
	case at.kind == model.ClusterIP:
		x.say(replaced + "masqueradeAll is on")
	case at.Addr().IsLoopback():
		x.say(replaced + "a loopback address means nothing to it")
	case x.decision.Key.Scope == model.Internal:
		x.say(replaced + "the client is this node, whose own may be the very address it talks to")
	default:
		x.say(replaced + "it may be on another node, and its answer must come back through this one")
	}
}

func (x *explainer) affinity(s *Service) {
	if s.Affinity > 0 {
		x.say("sessionAffinity ClientIP: a client goes to the backend it went to in the last %s, if it is still there",
			s.Affinity)
	}
}

// scheduler says which planes honour one. Which data plane is in force is not known here.
func (x *explainer) scheduler(s *Service) {
	if name := s.Scheduler.name(); name != "" && !x.t.tableShares.refuses(s.Name) {
		x.say("by annotation the scheduler is %s, in %s; others choose by weight", name, modeList(model.ModesWith(name)))
	}
}

// noRow explains a packet that no row takes.
func (x *explainer) noRow() {
	a := x.claim.addr
	switch g := x.decision.Guard; {
	case x.decision.Verdict == model.Reject:
		x.out.Row = fmt.Sprintf("guard %s %s", g, x.decision.Verdict)
		x.decide("%s is a ClusterIP, but not on this port", a)
	case x.decision.Verdict == model.Drop:
		x.out.Row = fmt.Sprintf("guard %s %s", g, x.decision.Verdict)
		of := func(p netip.Prefix) bool { return p.Contains(a) } // the guard may be a part of it
		x.decide("%s is in the Service CIDR %s, but no Service that is handled here has it", a,
			x.t.cidrs[slices.IndexFunc(x.t.cidrs, of)])
	case x.t.owner(x.claim) != nil:
		x.decide("Service %s has no endpoint on this node, and by externalFailoverPolicy Passthrough routing decides",
			x.t.owner(x.claim).service.Name)
		return
	default:
		x.say("no Service that is handled here has this address, port and protocol")
	}
	for _, name := range x.t.ServiceNames("") {
		x.near(x.t.entries[name].service)
	}
}

// near names a Service that a user might expect to take the packet, and says why it does not.
func (x *explainer) near(s *Service) {
	a := x.claim.addr
	external := slices.Contains(s.ExternalIPs, a)
	has := external || slices.Contains(s.ClusterIPs, a) || slices.Contains(s.LoadBalancerIPs, a)
	onPort := slices.ContainsFunc(s.Ports, func(p Port) bool {
		return p.Port == x.claim.port && p.Protocol == x.claim.protocol
	})
	nodePort := slices.ContainsFunc(s.Ports, func(p Port) bool {
		return p.NodePort == x.claim.port && p.Protocol == x.claim.protocol && x.t.onNode(a)
	})
	switch refused := x.t.refusal(s.Name); {
	case s.Ignored != "" && (has || nodePort):
		x.say("Service %s has it, but %s", s.Name, s.Ignored)
	case refused != "" && (has || nodePort):
		x.say("Service %s has it, but %s", s.Name, refused)
	case nodePort:
		x.say("%d/%s is a NodePort of Service %s, but %s does not take NodePort connections, only: %s "+
			"(nodePortAddresses)", x.claim.port, x.claim.protocol, s.Name, a, list(x.t.view.NodePorts))
	case external && onPort && !x.t.view.ExternalIPs:
		x.say("it is an external IP of Service %s, but external IPs are turned off", s.Name)
	case has && onPort && x.barred(s) != "":
		x.say("Service %s wants it, but %s", s.Name, x.barred(s))
	case has:
		x.say("Service %s has the address on these ports: %s", s.Name, list(s.Ports))
	}
}

// barred says why the packet's destination cannot be an address of a Service that has it; empty: it can.
func (x *explainer) barred(s *Service) string {
	at := address{AddrPort: x.claim.addrPort(), kind: model.ExternalIP}
	if slices.Contains(s.ClusterIPs, at.Addr()) {
		at.kind = model.ClusterIP
	}
	if why := x.t.view.refuse(at, x.claim.protocol); why != "" {
		return at.Addr().String() + " " + why
	}
	return ""
}

// fromNode fills in what a packet of the node itself leaves open.
func (t *Table) fromNode(p model.Packet) model.Packet {
	if !p.Source.IsValid() {
		p.Interface = ""
		for _, ip := range t.view.IPs {
			if ip.Is4() == p.Destination.Addr().Is4() {
				p.Source = ip
			}
		}
	}
	if t.onNode(p.Source) {
		p.Interface = ""
	}
	return p
}

// onNode reports whether an address is one of this node's.
func (t *Table) onNode(a netip.Addr) bool {
	return a.IsLoopback() || slices.Contains(t.addrs, a) || slices.Contains(t.view.IPs, a)
}

// list joins what is printed to people.
func list[T fmt.Stringer](all []T) string {
	if len(all) == 0 {
		return "none"
	}
	words := make([]string, len(all))
	for i, v := range all {
		words[i] = v.String()
	}
	return strings.Join(words, ", ")
}

// String is the port's number and protocol.
func (p Port) String() string { return fmt.Sprintf("%d/%s", p.Port, p.Protocol) }

// String is a text of several lines.
func (x Explanation) String() string {
	var b strings.Builder
	client := x.Source
	if x.Interface == "" {
		client = strings.TrimSpace(client + " (this node)")
	} else {
		on := " (on "
		if x.Assumed {
			on = " (as if on "
		}
		client += on + x.Interface + ")"
	}
	fmt.Fprintf(&b, "%s\n%s -> %s: %s\n", x.Summary, client, x.Destination, x.Verdict)
	if x.Row != "" {
		fmt.Fprintf(&b, "  %s\n", x.Row)
	}
	for _, r := range x.Reasons {
		fmt.Fprintf(&b, "  - %s\n", r)
	}
	for i, c := range x.Backends {
		if i == 0 {
			b.WriteString("  backends:\n")
		}
		source := ""
		if c.Masquerade {
			source = ", sees the node's address"
		}
		fmt.Fprintf(&b, "    %5.1f%%  %s%s%s\n", 100*c.Probability, c.Backend, on(c.Node), source)
	}
	for i, e := range x.Excluded {
		if i == 0 {
			b.WriteString("  left out:\n")
		}
		fmt.Fprintf(&b, "    %s%s: %s (%s)\n", e.Endpoint, on(e.Node), e.Reason, e.Object)
	}
	return b.String()
}

func on(node string) string {
	if node == "" {
		return ""
	}
	return " on " + node
}
