package service_test

import (
	"fmt"
	"net/netip"
	"testing"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// endings gives a Service of a namespace endpoints: +A is ready, -A terminates, each with @NODE or on another node.
func endings(namespace string, local bool, version uint64, endpoints ...service.Endpoint) service.Batch {
	name := service.Name{Namespace: namespace, Name: "web"}
	return service.Batch{
		Services: service.One(name, &service.Service{
			Name: name, ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.10")}, Barrier: true, InternalLocal: local,
			Ports: []service.Port{{Protocol: model.TCP, Port: 80}},
		}),
		Slices: service.One(name, &service.Slice{
			Name: name, Service: "web", Version: version, Ports: []service.SlicePort{{Protocol: model.TCP, Port: 8080}},
			Endpoints: endpoints,
		}),
	}
}

func runs(addr, node string) service.Endpoint {
	return service.Endpoint{Addr: netip.MustParseAddr(addr), Node: service.NodeNamed(node), Ready: true, Serving: true, Weight: 1}
}

func ends(addr, node string) service.Endpoint {
	return service.Endpoint{Addr: netip.MustParseAddr(addr), Node: service.NodeNamed(node), Serving: true, Terminating: true, Weight: 1}
}

// A terminating endpoint is in use where it is the only one that serves: in the cluster, or on this node.
func TestTable_Barrier(t *testing.T) {
	many := make([]service.Endpoint, 20)
	for i := range many {
		many[i] = ends(fmt.Sprint("10.244.2.", i+1), "b")
	}
	for _, c := range []struct {
		what  string
		batch service.Batch
		want  string
	}{
		{"none terminates", endings("default", false, 5, runs("10.244.1.1", "node")), "{1 0 []} {0 false}"},
		{"one does", endings("default", false, 6, ends("10.244.1.1", "node"), runs("10.244.2.1", "b")), "{1 6 []} {6 true}"},
		{"all do", endings("default", false, 7, ends("10.244.1.1", "node"), ends("10.244.2.1", "b")),
			"{1 7 [10.244.1.1 10.244.2.1]} {7 true}"},
		{"all on this node do", endings("default", true, 8, ends("10.244.1.1", "node"), runs("10.244.2.1", "b")),
			"{1 8 [10.244.1.1]} {8 true}"},
		{"on another node they do", endings("default", true, 9, runs("10.244.1.2", "node"), ends("10.244.2.1", "b")),
			"{1 9 []} {0 true}"},
		{"many do", endings("shop", false, 9, many...), "{1 9 [shop]} {0 true}"},
	} {
		table, err := service.NewTable(service.Options{NodeName: "node"})
		if err != nil {
			t.Fatal(err)
		}
		table.Update(c.batch)
		e := table.Ending(netip.MustParseAddr("10.244.1.1"))
		if got := fmt.Sprint(table.Barrier(), " ", fmt.Sprintf("{%d %t}", e.Version, e.All)); got != c.want {
			t.Errorf("%s: %s, want %s", c.what, got, c.want)
		}
		for what, is := range map[string]*service.Service{"no": nil, "another proxy's": {Barrier: true, Ignored: "theirs"}} {
			table.Update(c.batch)
			for name := range c.batch.Services.All() {
				table.Update(service.Batch{Services: service.One(name, is)})
			}
			if b := table.Barrier(); b.Services > 0 || b.Used != nil {
				t.Errorf("%s, then there is %s Service: %+v", c.what, what, b)
			}
		}
	}
}
