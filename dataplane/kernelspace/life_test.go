package kernelspace_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/kernelspace"
	"fairlead.dev/fairlead/dataplane/kernelspace/hns"
	"fairlead.dev/fairlead/lab/hnssim"
	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/model"
)

const webLines = `
balancer 10.96.0.10 port 80/6 to 8080 flags 1.0 distribution 0 source none endpoints 10.244.1.11,fd00::af4:10b,10.244.2.13
endpoint 10.244.2.13 remote mac 02-11-0a-f4-02-0d
`

func TestApply_calls(t *testing.T) {
	t.Parallel()
	n := newNode(t, newest, "L2Bridge")
	p, s := n.sync(web)
	n.wrote()
	step := func(what, rows, calls string) {
		t.Helper()
		s = n.apply(p, s, rows)
		want(t, what, n.wrote(), calls)
	}
	step("a backend elsewhere", webMore, "endpoint create\nload balancer modify")
	step("a backend less", web, "load balancer modify\nendpoint delete")
	others := strings.NewReplacer(":80/", ":443/", "shop/web", "shop/web:tls").Replace(web)
	step("another port", web+others, "load balancer create")
	step("its target port", web+strings.ReplaceAll(others, ":8080", ":8443"), "load balancer modify")
	step("another number", web+strings.ReplaceAll(others, ":443/", ":444/"), "load balancer create\nload balancer delete")
	step("the port goes", web, "load balancer delete")
	step("no change", web, "")
}

// TestApply_olderVersions replaces what they cannot modify.
func TestApply_olderVersions(t *testing.T) {
	t.Parallel()
	n := newNode(t, hns.Version{Major: 13, Minor: 3}, "L2Bridge")
	p, s := n.sync(web)
	n.wrote()
	s = n.apply(p, s, webMore)
	want(t, "the first replacement", n.wrote(), "endpoint create\nload balancer create\nload balancer delete\nload balancer create")
	want(t, "objects", n.lines(), webLines)
	n.apply(p, s, web)
	want(t, "the next ones", n.wrote(), "load balancer delete\nload balancer create\nendpoint delete")
}

// TestApply_idleModify is of versions that report success and do nothing.
func TestApply_idleModify(t *testing.T) {
	t.Parallel()
	n := newNode(t, newest, "L2Bridge")
	n.options.HNS = idle{hnssim.Client{Service: n.sim}}
	p, s := n.sync(web)
	n.apply(p, s, webMore)
	want(t, "objects", n.lines(), webLines)
}

type idle struct{ hnssim.Client }

func (i idle) ModifyLoadBalancer(ctx context.Context, b hns.LoadBalancer) (hns.LoadBalancer, error) {
	return i.LoadBalancer(ctx, b.ID)
}

func TestSync_adopts(t *testing.T) {
	t.Parallel()
	n := newNode(t, newest, "L2Bridge")
	p, _ := n.sync(webMore)
	p.Close()
	n.wrote()
	p, s := n.sync(webMore)
	want(t, "calls after a restart", n.wrote(), "")
	n.apply(p, s, "")
	want(t, "objects of no rows", n.lines(), "")
}

// TestSync_strangers has as many load balancers of other programs as a report names from which kube-proxy left one:
// kubernetes/kubernetes issue 110674.
func TestSync_strangers(t *testing.T) {
	t.Parallel()
	n := newNode(t, newest, "L2Bridge")
	for i := range 577 {
		n.stranger("172.31.0.1", uint16(1000+i))
	}
	before := n.lines()
	p, _ := n.sync(webMore)
	count := strings.Count(n.lines(), "balancer 172.31.0.1 ")
	if count != 577 {
		t.Errorf("%d of 577 load balancers of other programs are there", count)
	}
	if err := p.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
	if after := n.lines(); after != before {
		t.Errorf("objects after Remove:\n%s", after)
	}
	if left, err := kernelspace.Driver(n.options).Inspect(); err != nil || left.Rules {
		t.Errorf("after Remove: %+v, %v", left, err)
	}
}

// TestSync_kubeProxy takes over the load balancers of a kube-proxy, which leaves no record.
func TestSync_kubeProxy(t *testing.T) {
	t.Parallel()
	n := newNode(t, newest, "L2Bridge")
	n.stranger("10.96.0.10", 80)
	n.stranger("10.96.0.10", 81) // of a port that is gone
	n.stranger("10.97.0.10", 80)
	n.sync(webMore)
	var balancers []string
	for l := range strings.SplitSeq(n.lines(), "\n") {
		if strings.HasPrefix(l, "balancer") {
			balancers = append(balancers, strings.Join(strings.Fields(l)[1:4], " "))
		}
	}
	want(t, "load balancers", strings.Join(balancers, "\n"), "10.96.0.10 port 80/6\n10.97.0.10 port 80/6")
}

// scene is a node with objects of strangers and of an earlier process, and what shall become of it.
type scene struct {
	*node
	rows []string // one after the other
}

func newScene(t *testing.T, v hns.Version, kind string) *scene {
	s := &scene{node: newNode(t, v, kind), rows: []string{web, webMore, `
frontend 10.96.0.10:80/TCP any forward shop/web cluster snat never
pool shop/web cluster
backend shop/web cluster 10.244.1.12:8080 local
backend shop/web cluster 10.244.2.14:8080
frontend 192.0.2.1:30080/TCP any forward shop/web cluster snat always
frontend 10.96.0.11:53/UDP any forward dns/dns:dns cluster snat always
pool dns/dns:dns cluster
backend dns/dns:dns cluster 10.244.2.13:5353
`}}
	s.stranger("172.31.0.1", 80)
	p, _ := s.sync(s.rows[0])
	p.Close()
	s.wrote()
	return s
}

// run programs the rows until it fails, as a process does that is killed then. It reports whether there is no more.
func (s *scene) run(p dataplane.Dataplane, patient bool) bool {
	s.t.Helper()
	from := model.NewState()
	for i, rows := range s.rows {
		to := state(s.t, rows)
		var err error
		if i == 0 {
			err = p.Sync(s.t.Context(), to)
		} else {
			err = p.Apply(s.t.Context(), to, model.Diff(from, to))
		}
		for try := 0; patient && err != nil; try++ {
			if try == 3 {
				s.t.Fatalf("again and again: %v", err)
			}
			err = p.Sync(s.t.Context(), to)
		}
		if err != nil {
			return false
		}
		from = to
	}
	return true
}

// settled are the objects that an undisturbed run leaves.
func settled(t *testing.T, v hns.Version, kind string) string {
	t.Helper()
	s := newScene(t, v, kind)
	if !s.run(s.open(), false) {
		t.Fatal("an undisturbed run failed")
	}
	return s.lines()
}

func variants(t *testing.T, f func(t *testing.T, v hns.Version, kind string)) {
	for _, v := range []hns.Version{newest, {Major: 13, Minor: 3}} {
		for _, kind := range []string{"L2Bridge", hns.Overlay} {
			t.Run(fmt.Sprintf("%s on HNS %s", kind, v), func(t *testing.T) {
				t.Parallel()
				f(t, v, kind)
			})
		}
	}
}

// TestFaults fails each call once, with errors of several kinds.
func TestFaults(t *testing.T) {
	t.Parallel()
	variants(t, func(t *testing.T, v hns.Version, kind string) {
		final := settled(t, v, kind)
		for _, fault := range []error{hns.Error(0x8007000E), hns.ErrNotRunning, hns.ErrNotFound, hns.ErrExists, hns.ErrInvalid} {
			for k := 1; ; k++ {
				s, n := newScene(t, v, kind), 0
				s.sim.Fail(func(hnssim.Call) error {
					if n++; n == k {
						return fault
					}
					return nil
				})
				if !s.run(s.open(), true) {
					t.Fatalf("call %d fails with %v: no end", k, fault)
				}
				want(t, fmt.Sprintf("call %d fails with %v: objects", k, fault), s.lines(), final)
				if n < k {
					t.Logf("%v: %d calls", fault, n)
					break
				}
			}
		}
	})
}

// TestKilled ends the process before or after each call that changes something; the next process goes on.
func TestKilled(t *testing.T) {
	t.Parallel()
	variants(t, func(t *testing.T, v hns.Version, kind string) {
		final := settled(t, v, kind)
		for _, done := range []bool{false, true} {
			for k := 1; ; k++ {
				s := newScene(t, v, kind)
				killed := &mortal{Client: hnssim.Client{Service: s.sim}, at: k, done: done}
				s.options.HNS = killed
				p := s.open()
				ended := s.run(p, false)
				if err := p.Close(); err != nil { // which only closes a file, as a system does for a process
					t.Fatal(err)
				}
				s.options.HNS = hnssim.Client{Service: s.sim}
				if !s.run(s.open(), false) {
					t.Fatalf("killed at change %d (done: %v): the next process failed", k, done)
				}
				want(t, fmt.Sprintf("killed at change %d (done: %v): objects", k, done), s.lines(), final)
				if ended && killed.n < k {
					t.Logf("done %v: %d changes", done, killed.n)
					break
				}
			}
		}
	})
}

// mortal makes no calls from the one on at which the process dies. If done, HNS has carried out that one.
type mortal struct {
	hnssim.Client
	n, at int
	done  bool
}

var errKilled = errors.New("killed")

func (m *mortal) dead() bool { m.n++; return m.n > m.at || m.n == m.at && !m.done }

func dying[T any](m *mortal, call func() (T, error)) (T, error) {
	var none T
	if m.dead() {
		return none, errKilled
	}
	v, err := call()
	if m.n == m.at {
		return none, errKilled
	}
	return v, err
}

func (m *mortal) CreateEndpoint(ctx context.Context, e hns.Endpoint) (hns.Endpoint, error) {
	return dying(m, func() (hns.Endpoint, error) { return m.Client.CreateEndpoint(ctx, e) })
}

func (m *mortal) CreateLoadBalancer(ctx context.Context, b hns.LoadBalancer) (hns.LoadBalancer, error) {
	return dying(m, func() (hns.LoadBalancer, error) { return m.Client.CreateLoadBalancer(ctx, b) })
}

func (m *mortal) ModifyLoadBalancer(ctx context.Context, b hns.LoadBalancer) (hns.LoadBalancer, error) {
	return dying(m, func() (hns.LoadBalancer, error) { return m.Client.ModifyLoadBalancer(ctx, b) })
}

func (m *mortal) DeleteEndpoint(ctx context.Context, id string) error {
	_, err := dying(m, func() (any, error) { return nil, m.Client.DeleteEndpoint(ctx, id) })
	return err
}

func (m *mortal) DeleteLoadBalancer(ctx context.Context, id string) error {
	_, err := dying(m, func() (any, error) { return nil, m.Client.DeleteLoadBalancer(ctx, id) })
	return err
}

// TestRestartOfHNS loses all objects after each call; the network plugin makes its own again.
func TestRestartOfHNS(t *testing.T) {
	t.Parallel()
	variants(t, func(t *testing.T, v hns.Version, kind string) {
		fresh := newNode(t, v, kind)
		fresh.sync(newScene(t, v, kind).rows[2])
		final := fresh.lines()
		for k := 1; ; k++ {
			s, n := newScene(t, v, kind), 0
			restarted := false
			s.sim.Fail(func(hnssim.Call) error {
				n++
				if n >= k && n < k+3 && !restarted {
					return hns.ErrNotRunning
				}
				return nil
			})
			p := s.open()
			done := s.run(p, false)
			restarted = true
			s.sim.Restart()
			s.plugin(kind)
			to := state(t, s.rows[2])
			if err := audited(t, p, to); err != nil {
				t.Fatalf("restart at call %d: %v", k, err)
			}
			want(t, fmt.Sprintf("restart at call %d: objects", k), s.lines(), final)
			if done {
				t.Logf("%d calls", n)
				break
			}
		}
	})
}

// audited does what the engine does: it audits, and repairs or begins anew.
func audited(t *testing.T, p dataplane.Dataplane, s *model.State) error {
	t.Helper()
	for range 4 {
		r, err := p.Audit(t.Context(), s, dataplane.Quick)
		switch {
		case err != nil:
			err = p.Sync(t.Context(), s)
		case len(r.Drifts) > 0:
			err = p.Repair(t.Context(), s, r)
		default:
			return nil
		}
		t.Log("repaired: ", err)
	}
	return errors.New("it is never repaired")
}

// TestAudit notices what another program does, and repairs it.
func TestAudit(t *testing.T) {
	t.Parallel()
	n := newNode(t, newest, "L2Bridge")
	p, s := n.sync(webMore)
	final := n.lines()
	vandalise := func(what string, d dataplane.Depth, drift string, f func(id string, b hns.LoadBalancer)) {
		t.Helper()
		ids, err := n.options.HNS.LoadBalancerIDs(t.Context())
		if err != nil || len(ids) != 1 {
			t.Fatal(ids, err)
		}
		b, err := n.options.HNS.LoadBalancer(t.Context(), ids[0])
		if err != nil {
			t.Fatal(err)
		}
		f(ids[0], b)
		r, err := p.Audit(t.Context(), s, d)
		if err != nil {
			t.Fatal(err)
		}
		var drifts []string
		for _, d := range r.Drifts {
			drifts = append(drifts, d.String())
		}
		want(t, what, strings.Join(drifts, "\n"), drift)
		if err := p.Repair(t.Context(), s, r); err != nil {
			t.Fatal(err)
		}
		want(t, what+", repaired", n.lines(), final)
		if r, err := p.Audit(t.Context(), s, dataplane.Full); err != nil || len(r.Drifts) > 0 {
			t.Errorf("%s, repaired: %v, %v", what, r.Drifts, err)
		}
	}
	const right = "port 8080, mapping flags 0, distribution 0; 10.244.1.11,10.244.2.13; flags 1; source none"
	vandalise("nothing", dataplane.Full, "", func(string, hns.LoadBalancer) {})
	vandalise("deleted", dataplane.Quick, "load balancer 10.96.0.10:80/tcp: missing: "+right, func(id string, _ hns.LoadBalancer) {
		n.do(hnssim.Call{Verb: hnssim.Delete, Kind: hnssim.LoadBalancers, ID: id})
	})
	vandalise("modified", dataplane.Quick, "load balancer 10.96.0.10:80/tcp: is "+
		"port 8081, mapping flags 0, distribution 0; 10.244.1.11,10.244.2.13; flags 1; source none, should be "+right,
		func(id string, b hns.LoadBalancer) {
			b.PortMappings[0].InternalPort = 8081
			n.do(hnssim.Call{Verb: hnssim.Modify, Kind: hnssim.LoadBalancers, ID: id, Document: document(b)})
		})
}

// TestEndpoints_local is of pods whose endpoints the network plugin makes late, and of addresses that move.
func TestEndpoints_local(t *testing.T) {
	t.Parallel()
	n := newNode(t, newest, "L2Bridge")
	rows := web + "backend shop/web cluster 10.244.1.13:8080 local\n"
	p, s := n.open(), state(t, rows)
	err := p.Sync(t.Context(), s)
	if !errors.Is(err, dataplane.ErrPartial) || !strings.Contains(err.Error(), "10.244.1.13") {
		t.Errorf("a backend without an endpoint: %v", err)
	}
	want(t, "the others serve", n.lines(), `
balancer 10.96.0.10 port 80/6 to 8080 flags 1.0 distribution 0 source none endpoints 10.244.1.11,fd00::af4:10b`)
	n.do(hnssim.Call{Verb: hnssim.Create, Kind: hnssim.Endpoints, ID: n.network(), Document: document(hns.Endpoint{
		IPConfigurations: []hns.IPConfig{{Address: "10.244.1.13"}},
	})})
	if err := p.Sync(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	want(t, "all serve", n.lines(), `
balancer 10.96.0.10 port 80/6 to 8080 flags 1.0 distribution 0 source none endpoints 10.244.1.11,fd00::af4:10b,10.244.1.13`)

	s = n.apply(p, s, webMore)
	n.do(hnssim.Call{Verb: hnssim.Create, Kind: hnssim.Endpoints, ID: n.network(), Document: document(hns.Endpoint{
		IPConfigurations: []hns.IPConfig{{Address: "10.244.2.13"}},
	})})
	n.apply(p, s, web+"backend shop/web cluster 10.244.2.13:8080 local\n")
	want(t, "an address has moved here", n.lines(), `
balancer 10.96.0.10 port 80/6 to 8080 flags 1.0 distribution 0 source none endpoints 10.244.1.11,fd00::af4:10b,10.244.2.13`)
}

// TestOverlay has endpoints with the nodes that packets are sent to, and makes them anew when the network plugin tells
// of a node later.
func TestOverlay(t *testing.T) {
	t.Parallel()
	n := newNode(t, newest, hns.Overlay)
	p, s := n.sync(webMore + "backend shop/web cluster 10.244.3.14:8080\n")
	line := func(prefix string) string {
		for l := range strings.SplitSeq(n.lines(), "\n") {
			if strings.HasPrefix(l, prefix) {
				return l
			}
		}
		return ""
	}
	provider := func(a string) string {
		_, after, _ := strings.Cut(line("endpoint "+a+" "), `"ProviderAddress":`)
		return strings.Trim(after, `"}`)
	}
	own := provider("10.96.0.10")
	for a, node := range map[string]string{"10.244.2.13": "192.0.2.22", "10.244.3.14": own} {
		if got := provider(a); got != node {
			t.Errorf("%s is on node %s, not %s", got, a, node)
		}
	}
	if !strings.Contains(line("balancer 10.96.0.10"), " source "+own+" ") {
		t.Errorf("a backend outside of the overlay: %s", line("balancer 10.96.0.10"))
	}
	if line("endpoint 10.244.1.2 local") == "" {
		t.Error("no endpoint for the source of load balancers")
	}

	id := n.network()
	n.sim.SetNetwork(id, document(hns.Network{Name: "cni", Type: hns.Overlay, Policies: []hns.Policy{
		route("10.244.2.0/24", "192.0.2.22"), route("10.244.3.0/24", "192.0.2.33"),
	}}))
	r, err := p.Audit(t.Context(), s, dataplane.Full)
	if err != nil || len(r.Drifts) == 0 {
		t.Fatalf("a node has joined: %v, %v", r.Drifts, err)
	}
	if err := p.Repair(t.Context(), s, r); err != nil {
		t.Fatal(err)
	}
	if got := provider("10.244.3.14"); got != "192.0.2.33" {
		t.Errorf("after the repair 10.244.3.14 is on node %s", got)
	}
	if !strings.Contains(line("balancer 10.96.0.10"), " source 10.244.1.2 ") {
		t.Errorf("all backends are in the overlay: %s", line("balancer 10.96.0.10"))
	}
	if r, err := p.Audit(t.Context(), s, dataplane.Full); err != nil || len(r.Drifts) > 0 {
		t.Errorf("after the repair: %v, %v", r.Drifts, err)
	}
	if err := p.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
	want(t, "after Remove", n.lines(), "")
}

// TestRecord_lost makes nothing that it could not record.
func TestRecord_lost(t *testing.T) {
	t.Parallel()
	n := newNode(t, newest, "L2Bridge")
	n.options.Records = filepath.Join(n.options.Records, "file")
	if err := os.WriteFile(n.options.Records, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := kernelspace.Driver(n.options).Open(dataplane.Config{Log: testLog(t)})
	if err == nil {
		err = p.Sync(t.Context(), state(t, webMore))
	}
	if err == nil || !strings.Contains(err.Error(), n.options.Records) {
		t.Errorf("%v", err)
	}
	want(t, "objects", n.lines(), "")
}

// TestRandom follows random changes, and is then where a new plane is that has never seen anything else.
func TestRandom(t *testing.T) {
	t.Parallel()
	seed := sample.Seed(t)
	variants(t, func(t *testing.T, v hns.Version, kind string) {
		r := rand.New(rand.NewPCG(seed, 0))
		n := newNode(t, v, kind)
		p, s := n.sync("")
		for range 60 {
			rows := randomRows(r)
			s = n.apply(p, s, rows)
			fresh := newNode(t, v, kind)
			fresh.sync(rows)
			want(t, "after "+rows, n.lines(), fresh.lines())
			if r, err := p.Audit(t.Context(), s, dataplane.Full); err != nil || len(r.Drifts) > 0 || t.Failed() {
				t.Fatal(r.Drifts, err)
			}
		}
	})
}

func randomRows(r *rand.Rand) string {
	var rows strings.Builder
	for i := range 4 {
		if r.IntN(3) == 0 {
			continue
		}
		name := fmt.Sprintf("ns/s%d", i)
		port := 8080 + r.IntN(2)
		snat := []string{"never", "always"}[r.IntN(2)]
		fmt.Fprintf(&rows, "pool %s cluster\n", name)
		n := 0
		for _, a := range []string{"10.244.1.11", "10.244.1.12", "10.244.2.13", "10.244.2.14", "10.244.3.15"} {
			if r.IntN(2) == 0 || a == "10.244.3.15" && n == 0 {
				n++
				local := ""
				if netip.MustParsePrefix("10.244.1.0/24").Contains(netip.MustParseAddr(a)) {
					local = " local"
				}
				fmt.Fprintf(&rows, "backend %s cluster %s:%d%s\n", name, a, port, local)
			}
		}
		for _, a := range []string{fmt.Sprintf("10.96.0.%d:80", i), fmt.Sprintf("192.0.2.1:%d", 30000+i),
			fmt.Sprintf("192.0.2.101:%d", 30000+i), fmt.Sprintf("203.0.113.%d:80", i), "198.51.100.1:" + fmt.Sprint(80+i)} {
			if strings.HasPrefix(a, "10.96") || r.IntN(2) == 0 {
				fmt.Fprintf(&rows, "frontend %s/TCP any forward %s cluster snat %s\n", a, name, snat)
			}
		}
	}
	return rows.String()
}

// TestNetworkGone has the network plugin delete its network while load balancers change. The library tells of a missing
// network by two errors at once.
func TestNetworkGone(t *testing.T) {
	t.Parallel()
	n := newNode(t, newest, "L2Bridge")
	p, s := n.sync(web)
	n.sim.Fail(func(c hnssim.Call) error {
		if c.Verb == hnssim.Create && c.Kind == hnssim.Endpoints {
			return fmt.Errorf("%w: %w", hns.ErrNoNetwork, hns.ErrNotFound)
		}
		return nil
	})
	more := state(t, webMore)
	if err := p.Apply(t.Context(), more, model.Diff(s, more)); !errors.Is(err, hns.ErrNoNetwork) {
		t.Errorf("without a network: %v", err)
	}
	n.sim.Fail(nil)
	n.sim.Restart()
	n.plugin("L2Bridge")
	if err := p.Sync(t.Context(), more); err != nil {
		t.Fatal(err)
	}
	want(t, "with a new network", n.lines(), webLines)
}

// joined is an overlay node with a backend on a node of which the network plugin has told only later.
func joined(t *testing.T) (*node, dataplane.Dataplane, *model.State, string) {
	t.Helper()
	n := newNode(t, newest, hns.Overlay)
	rows := web + "backend shop/web cluster 10.244.3.14:8080\n"
	p, s := n.sync(rows)
	n.sim.SetNetwork(n.network(), document(hns.Network{Name: "cni", Type: hns.Overlay, Policies: []hns.Policy{
		route("10.244.2.0/24", "192.0.2.22"), route("10.244.3.0/24", "192.0.2.33"),
	}}))
	if r, err := p.Audit(t.Context(), s, dataplane.Quick); err != nil || len(r.Drifts) == 0 {
		t.Fatalf("a node has joined: %v, %v", r.Drifts, err)
	}
	return n, p, s, rows
}

// TestOverlay_restart restarts HNS between the audit that finds a wrong endpoint and its repair.
func TestOverlay_restart(t *testing.T) {
	t.Parallel()
	n, p, s, rows := joined(t)
	n.sim.Restart()
	n.plugin(hns.Overlay)
	if err := audited(t, p, s); err != nil {
		t.Fatal(err)
	}
	fresh := newNode(t, newest, hns.Overlay)
	fresh.sync(rows)
	want(t, "objects", n.lines(), fresh.lines())
}

// TestOverlay_apply has another change come between the audit that finds a wrong endpoint and its repair.
func TestOverlay_apply(t *testing.T) {
	t.Parallel()
	n, p, s, rows := joined(t)
	s = n.apply(p, s, rows+"frontend 10.96.0.11:80/TCP any forward shop/web cluster snat never\n")
	for l := range strings.SplitSeq(n.lines(), "\n") {
		if strings.HasPrefix(l, "balancer") && !strings.Contains(l, "10.244.3.14") {
			t.Error(l)
		}
	}
	if r, err := p.Audit(t.Context(), s, dataplane.Full); err != nil || len(r.Drifts) > 0 {
		t.Errorf("after the change: %v, %v", r.Drifts, err)
	}
}

// TestOverlay_joins has a pod come on a node that has joined the overlay since the plane began.
func TestOverlay_joins(t *testing.T) {
	t.Parallel()
	n := newNode(t, newest, hns.Overlay)
	p, s := n.sync(webMore)
	n.sim.SetNetwork(n.network(), document(hns.Network{Name: "cni", Type: hns.Overlay, Policies: []hns.Policy{
		route("10.244.2.0/24", "192.0.2.22"), route("10.244.3.0/24", "192.0.2.33"),
	}}))
	n.apply(p, s, webMore+"backend shop/web cluster 10.244.3.14:8080\n")
	if !strings.Contains(n.lines(), `0a-f4-03-0e ProviderAddress {"ProviderAddress":"192.0.2.33"}`) {
		t.Errorf("a pod on a new node: %s", n.lines())
	}
}

// TestSync_afterFailure has a load balancer go away that could not be made. The next Sync reads all again.
func TestSync_afterFailure(t *testing.T) {
	t.Parallel()
	n := newNode(t, newest, "L2Bridge")
	p, _ := n.sync(web)
	n.sim.Fail(func(c hnssim.Call) error {
		if c.Verb == hnssim.Create {
			return hns.ErrInvalid
		}
		return nil
	})
	if err := p.Sync(t.Context(), state(t, web+"frontend 10.96.0.10:81/TCP any forward shop/web cluster snat never\n")); !errors.Is(err, dataplane.ErrPartial) {
		t.Fatal(err)
	}
	n.sim.Fail(nil)
	final := "balancer 10.96.0.10 port 80/6 to 8080 flags 1.0 distribution 0 source none endpoints 10.244.1.11,fd00::af4:10b"
	for range 2 { // the first may go by what it knows
		if err := p.Sync(t.Context(), state(t, web)); err != nil {
			t.Fatal(err)
		}
		ids, _ := n.options.HNS.LoadBalancerIDs(t.Context())
		b, err := n.options.HNS.LoadBalancer(t.Context(), ids[0])
		if err != nil {
			t.Fatal(err)
		}
		if len(ids) == 1 {
			b.PortMappings[0].InternalPort = 1
			n.do(hnssim.Call{Verb: hnssim.Modify, Kind: hnssim.LoadBalancers, ID: ids[0], Document: document(b)})
		}
	}
	if err := p.Sync(t.Context(), state(t, web)); err != nil {
		t.Fatal(err)
	}
	want(t, "objects", n.lines(), final)
}

// TestRemove_bare removes everything with no more options than "fairlead clean" has: it does not read the configuration.
func TestRemove_bare(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"L2Bridge", hns.Overlay} {
		n := newNode(t, hns.Version{Major: 9, Minor: 2}, kind)
		n.do(hnssim.Call{Verb: hnssim.Create, Kind: hnssim.Networks, Document: document(hns.Network{Name: "nat", Type: "NAT"})})
		n.stranger("172.31.0.1", 80)
		before := n.lines()
		p, _ := n.sync(webMore)
		p.Close()
		bare := kernelspace.Driver(kernelspace.Options{Records: n.options.Records, HNS: named{hnssim.Client{Service: n.sim}}})
		if err := bare.Remove(t.Context(), dataplane.Config{}); err != nil {
			t.Fatal(err)
		}
		want(t, kind, n.lines(), before)
		if left, err := bare.Inspect(); err != nil || left.Rules {
			t.Errorf("after Remove: %+v, %v", left, err)
		}
	}
}

// named finds no network without a name.
type named struct{ hnssim.Client }

func (n named) Network(ctx context.Context, name string) (hns.Network, error) {
	if name == "" {
		return hns.Network{}, hns.ErrNoNetwork
	}
	return n.Client.Network(ctx, name)
}

// TestSync_kubeProxyAgain has kube-proxy serve between two processes. It deletes all load balancers and makes its own.
func TestSync_kubeProxyAgain(t *testing.T) {
	t.Parallel()
	n := newNode(t, newest, "L2Bridge")
	p, _ := n.sync(webMore)
	p.Close()
	ids, _ := n.options.HNS.LoadBalancerIDs(t.Context())
	for _, id := range ids {
		n.do(hnssim.Call{Verb: hnssim.Delete, Kind: hnssim.LoadBalancers, ID: id})
	}
	n.stranger("10.96.0.10", 80)
	n.stranger("172.31.0.1", 80)
	n.sync(webMore)
	if !strings.Contains(n.lines(), strings.Split(strings.TrimSpace(webLines), "\n")[0]) {
		t.Errorf("after kube-proxy: %s", n.lines())
	}
}

// TestSync_kubeProxyEndpoints takes over kube-proxy's remote endpoints, and deletes those that nothing needs.
func TestSync_kubeProxyEndpoints(t *testing.T) {
	t.Parallel()
	n := newNode(t, newest, "L2Bridge")
	for a, mac := range map[string]string{
		"10.244.2.13": "02-11-0A-F4-02-0D", "10.244.2.14": "02-11-0a-f4-02-0e", "10.244.2.15": "02-11-0a-f4-02-0e",
	} {
		n.do(hnssim.Call{Verb: hnssim.Create, Kind: hnssim.Endpoints, ID: n.network(), Document: document(hns.Endpoint{
			Flags: hns.Remote, MACAddress: mac, IPConfigurations: []hns.IPConfig{{Address: a}},
		})})
	}
	n.wrote()
	n.sync(webMore)
	want(t, "calls", n.wrote(), "load balancer create\nendpoint delete")
	want(t, "objects", n.lines(), webLines+"endpoint 10.244.2.15 remote mac 02-11-0a-f4-02-0e")
}

// TestSync_otherSettings has a plane go on that was opened while another one served: with other settings.
func TestSync_otherSettings(t *testing.T) {
	t.Parallel()
	n := newNode(t, newest, "L2Bridge")
	p, s := n.sync(web)
	next := n.open()
	s = n.apply(p, s, webMore+"frontend 10.96.0.11:80/TCP any forward shop/web cluster snat never\n")
	p.Close()
	if err := next.Sync(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	n.apply(next, s, "")
	want(t, "objects of no rows", n.lines(), "")
}
