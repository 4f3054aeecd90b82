package service_test

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// wide is a Service with so many ports, each of which has all of so many endpoints.
func wide(namespace, name string, created int64, ports, endpoints int) service.Batch {
	s := &service.Service{
		Name: service.Name{Namespace: namespace, Name: name}, Created: created, ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, namespace[0], name[0]})},
	}
	slice := &service.Slice{Name: service.Name{Namespace: namespace, Name: name + "-1"}, Service: name}
	for i := range ports {
		port := fmt.Sprintf("p%05d", i)
		s.Ports = append(s.Ports, service.Port{Name: port, Protocol: 6, Port: uint16(i + 1)})
		slice.Ports = append(slice.Ports, service.SlicePort{Name: port, Protocol: 6, Port: 8080})
	}
	a := addr("10.100.0.0")
	for range endpoints {
		a = a.Next()
		slice.Endpoints = append(slice.Endpoints, service.Endpoint{Addr: a, Ready: true, Serving: true, Weight: 1})
	}
	return service.Batch{Services: service.One(s.Name, s), Slices: service.One(slice.Name, slice)}
}

// A Service beyond its namespace's share is refused by name. Others are served as if it was not there, and it gets what
// they do not use.
func TestTable_shares(t *testing.T) {
	table := newTable(t, service.Options{})
	step := func(what string, b service.Batch, refused, problems string) {
		t.Helper()
		_, _, got := table.Update(b)
		if text := fmt.Sprint(table.Refused()); text != refused {
			t.Errorf("%s: refused are %s, should be %s", what, text, refused)
		}
		if text := problemLines(got); strings.Count(text, "\n") != strings.Count(problems, "\n")+1 && problems != "" ||
			problems == "" && strings.Contains(text, "entries") || !strings.Contains(text, problems) {
			t.Errorf("%s: the problems are\n%s\nshould be %q", what, text, problems)
		}
	}
	gone := func(namespace, name string) service.Batch {
		return service.Batch{Services: service.One[service.Service](service.Name{Namespace: namespace, Name: name}, nil)}
	}
	step("an ordinary one", wide("victim", "web", 1, 2, 1000), "[]", "")
	step("many ports, many endpoints", wide("greedy", "a", 2, 180, 180), "[]", "")
	step("more than there is", wide("greedy", "b", 3, 180, 180), "[greedy/b]", "Service greedy/b: spec: its ports × ")
	step("an older one comes before", wide("greedy", "c", 1, 180, 180), "[greedy/a greedy/b]", "Service greedy/a: spec: its ports × ")
	step("another namespace", wide("other", "d", 9, 130, 130), "[greedy/a greedy/b greedy/c]", "Service greedy/c: spec: its ports × ")
	step("it is gone", gone("other", "d"), "[greedy/a greedy/b]", "")
	step("the older one is gone", gone("greedy", "c"), "[greedy/b]", "")
	step("one that nothing can have", wide("other", "e", 1, 5000, 5000), "[greedy/b other/e]", "Service other/e: spec: its ports × ")
}

// The weights of a Service are small where it has very many of them, and equal ones never matter.
func TestTable_weights(t *testing.T) {
	for _, c := range []struct {
		ports, endpoints int
		weights          string // the first, the last and all together, of a port
	}{
		{6, 40, "1 40 820"}, {1, 256, "1 256 32896"}, {2, 256, "1 128 16512"}, {40, 50, "1 32 816"}, {41, 50, "1 16 409"}, {300, 40, "1 16 329"},
	} {
		b := wide("one", "web", 1, c.ports, c.endpoints)
		slice := b.Slices[0].Is
		for i := range slice.Endpoints {
			slice.Endpoints[i].Weight = uint16(i + 1)
		}
		state, _, _ := newTable(t, service.Options{}).Update(b)
		for id, p := range state.Pools {
			all, sum := p.Backends, 0
			for _, backend := range all {
				sum += int(backend.Weight)
			}
			got := fmt.Sprint(all[0].Weight, " ", all[len(all)-1].Weight, " ", sum)
			if got != c.weights {
				t.Errorf("%d ports, %d endpoints: pool %s has weights %s, not %s", c.ports, c.endpoints, id, got, c.weights)
			}
		}
	}
}

// Listeners for health checks are shared, too. A Service that gets none is served all the same.
func TestTable_listeners(t *testing.T) {
	options := defaultOptions()
	table := newTable(t, options)
	b := service.Batch{Node: testNode(), Addrs: []netip.Addr{addr("192.0.2.1")}}
	const evil = 2700
	for i := range evil + 3 {
		s := claimant(i)
		s.ExternalIPs, s.Name.Namespace = nil, "evil"
		if i >= evil {
			s.Name.Namespace = "victim"
		}
		s.HealthCheckNodePort, s.ExternalLocal, s.Created = uint16(31000+i), true, int64(i)
		if i == 0 { // does not count
			s.LoadBalancerIPs = []netip.Addr{addr("203.0.113.1")}
		}
		b.Services.Set(s.Name, s)
	}
	state, _, problems := table.Update(b)
	if len(state.Health) != 2048+1 || len(state.Frontends) != evil+3+1 {
		t.Errorf("there are %d health checks, %d frontends", len(state.Health), len(state.Frontends))
	}
	for _, p := range problems {
		if !strings.Contains(p.Error(), "Service evil/") || p.Cause != service.Share ||
			!strings.Contains(p.Error(), "listeners for health checks is used up") {
			t.Errorf("%v", p)
		}
	}
	if len(problems) != evil+3-2048 {
		t.Errorf("%d are told", len(problems))
	}
}

// So are tables of schedulers. A Service that gets none is served by the scheduler that is configured.
func TestTable_tables(t *testing.T) {
	table := newTable(t, defaultOptions())
	b := service.Batch{Node: testNode()}
	const evil = 2100
	for i := range evil + 3 {
		s := claimant(i)
		s.ExternalIPs, s.Name.Namespace, s.Created = nil, "evil", int64(i)
		s.Scheduler = service.Scheduler(1 + slices.Index(model.Schedulers(), "mh"))
		if i >= evil {
			s.Name.Namespace = "victim"
		}
		b.Services.Set(s.Name, s)
	}
	_, _, problems := table.Update(b)
	for _, p := range problems {
		if !strings.Contains(p.Error(), "Service evil/") || !strings.Contains(p.Error(), "tables of such schedulers is used up") {
			t.Errorf("%v", p)
		}
	}
	if len(problems) != evil+3-2048 {
		t.Errorf("%d are told", len(problems))
	}
}

// The order of arrival does not decide which Services are served.
func TestTable_sharesInAnyOrder(t *testing.T) {
	seed := sample.Seed(t)
	d := seeded(seed)
	table, w := newTable(t, service.Options{}), world{}
	for range 12 {
		b := wide(pick(d, "a", "b", "c"), pick(d, "x", "y", "z"), int64(d.n(3)), 100+d.n(100), 100+d.n(150))
		if d.one(4) {
			b.Services[0].Is = nil
		}
		w.add(b)
		state, _, _ := table.Update(b)
		other := newTable(t, service.Options{})
		fresh, _, _ := other.Update(w.Batch)
		if got, want := fmt.Sprint(table.Refused()), fmt.Sprint(other.Refused()); got != want {
			t.Errorf("after a chain of Updates %s are refused, at once %s", got, want)
		}
		if !maps.Equal(rowsOf(state), rowsOf(fresh)) {
			t.Error("the rows differ")
		}
	}
	if t.Failed() {
		t.Logf("%s=%d repeats it", sample.SeedVariable, seed)
	}
}

// rowsOf is how many frontends each Service has.
func rowsOf(s *model.State) map[string]int {
	rows := map[string]int{}
	for _, f := range s.Frontends {
		name, _, _ := strings.Cut(f.Service, ":")
		rows[name]++
	}
	return rows
}

// One Service with very many ports takes time in proportion to them: before, it took hours.
func TestTable_manyPorts(t *testing.T) {
	table := newTable(t, service.Options{})
	state, _, problems := table.Update(wide("victim", "web", 1, 60000, 1))
	if len(state.Frontends) != 60000 || len(state.Pools) != 60000 || len(problems) > 0 {
		t.Errorf("there are %d frontends, %d pools, problems:\n%s", len(state.Frontends), len(state.Pools), problemLines(problems))
	}
	state, _, _ = table.Update(wide("victim", "web", 1, 30000, 1))
	if len(state.Frontends) != 30000 || len(state.Pools) != 30000 {
		t.Errorf("there are %d frontends, %d pools", len(state.Frontends), len(state.Pools))
	}
}

// Many Services want one external address: all but one are told, once, and none is compiled for another's sake.
func TestTable_manyClaims(t *testing.T) {
	table := newTable(t, service.Options{ExternalIPs: true})
	b := service.Batch{}
	const many = 10000
	for i := range many {
		b.Services.Set(claimant(i).Name, claimant(i))
	}
	_, _, problems := table.Update(b)
	if len(problems) != many-1 {
		t.Errorf("%d are told, should be %d", len(problems), many-1)
	}
	first := claimant(0).Name
	_, change, problems := table.Update(service.Batch{Services: service.One[service.Service](first, nil)})
	if len(problems) != many-2 || len(change.Frontends.Set) != 1 {
		t.Errorf("when the first one is gone %d are told, and %d rows set", len(problems), len(change.Frontends.Set))
	}
	last := claimant(many - 1)
	_, change, problems = table.Update(service.Batch{Services: service.One(last.Name, last)})
	if len(problems) != 0 || !change.Empty() {
		t.Errorf("when the last one is said again: %s%v", problemLines(problems), change)
	}
}

func claimant(i int) *service.Service {
	ip := netip.AddrFrom4([4]byte{10, 97, byte(i >> 8), byte(i)})
	return &service.Service{
		Name: service.Name{Namespace: "greedy", Name: fmt.Sprintf("s%05d", i)}, ClusterIPs: []netip.Addr{ip},
		ExternalIPs: []netip.Addr{addr("203.0.113.1")}, Ports: []service.Port{{Protocol: 6, Port: 80}},
	}
}
