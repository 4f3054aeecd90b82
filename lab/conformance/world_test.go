package conformance

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// world is what a proxy on the node knows: a Table, and the objects in it.
type world struct {
	table   *service.Table
	present map[string]service.Batch // by the object's id
	problem []service.Problem        // of the last update
}

// nodeManifest is the Node object of the cast; a case may bring another one.
const nodeManifest = `
apiVersion: v1
kind: Node
metadata: {name: node, labels: {topology.kubernetes.io/zone: zone-a}}
spec: {podCIDRs: [%s]}
status: {addresses: [%s]}
`

// newWorld is the world before a case's first object, and its State.
func newWorld(c *testCase) (*world, *model.State, error) {
	return worldOf(c, func(*service.Options) {})
}

// worldOf changes the options of the Table.
func worldOf(c *testCase, change func(*service.Options)) (*world, *model.State, error) {
	o, err := c.tableOptions()
	if err != nil {
		return nil, nil, err
	}
	change(&o)
	table, err := service.NewTable(o)
	if err != nil {
		return nil, nil, err
	}
	w := &world{table: table, present: map[string]service.Batch{}}
	batch, err := c.node()
	if err != nil {
		return nil, nil, err
	}
	state, _, problems := table.Update(batch)
	if len(problems) > 0 {
		return nil, nil, fmt.Errorf("an empty cluster has problems: %v", problems)
	}
	return w, state, nil
}

// node is the batch that describes the node under test.
func (c *testCase) node() (service.Batch, error) {
	var cidrs, addrs []string
	for _, p := range c.prefixes(testbed.PodCIDRs(testbed.Node)) {
		cidrs = append(cidrs, `"`+p.String()+`"`)
	}
	for _, a := range c.inFamily(nodeAddrs()[0]) {
		addrs = append(addrs, fmt.Sprintf(`{type: InternalIP, address: "%s"}`, a))
	}
	manifest := fmt.Sprintf(nodeManifest, strings.Join(cidrs, ", "), strings.Join(addrs, ", "))
	o, err := parseObject([]byte(manifest))
	if err != nil {
		return o.batch, err
	}
	o.batch.ServiceCIDRs = c.prefixes(testbed.ServiceCIDRs())
	if text, ok := c.options["service-cidr"]; ok {
		more, err := netip.ParsePrefix(text)
		if err != nil {
			return o.batch, err
		}
		o.batch.ServiceCIDRs = append(o.batch.ServiceCIDRs, more)
	}
	o.batch.Addrs = c.inFamily(nodeAddrs()...)
	return o.batch, err
}

// prefixes keeps those of the case's family.
func (c *testCase) prefixes(both []netip.Prefix) []netip.Prefix {
	return slices.DeleteFunc(slices.Clone(both), func(p netip.Prefix) bool {
		return c.family == ipv4 && p.Addr().Is6() || c.family == ipv6 && p.Addr().Is4()
	})
}

// tableOptions are the case's options over the defaults: primary NodePorts, pods by cluster CIDR.
func (c *testCase) tableOptions() (service.Options, error) {
	o := service.Options{
		NodeName:          string(testbed.Node),
		NodePortAddresses: []string{"primary"},
		ExternalIPs:       true,
	}
	o.DetectLocal.Mode = service.LocalClusterCIDR
	o.DetectLocal.ClusterCIDRs = c.prefixes(testbed.ClusterCIDRs())
	for key, value := range c.options {
		switch key {
		case "nodeport-addresses":
			o.NodePortAddresses = strings.Split(value, ",")
		case "masquerade-all":
			o.MasqueradeAll = value == "true"
		case "detect-local-mode":
			o.DetectLocal.Mode = service.LocalMode(value)
		case "cluster-cidr":
			o.DetectLocal.ClusterCIDRs = nil // "none"
		case "pod-bridge-interface", "pod-interface-name-prefix":
			o.DetectLocal.Interface = value
		case "allow-external-ips":
			o.ExternalIPs = value == "true"
		case "pod-bridge", "family", "service-cidr":
		default:
			if !strings.HasPrefix(key, "skip ") {
				return o, fmt.Errorf("unknown option %q", key)
			}
		}
	}
	return o, nil
}

// change adds or replaces objects, and deletes others by id, in one Update.
func (w *world) change(objects []object, deleted ...string) (*model.State, model.Change) {
	batch := service.Batch{}
	for _, id := range deleted {
		remove(&batch, w.present[id])
		delete(w.present, id)
	}
	for _, o := range objects {
		remove(&batch, w.present[o.id])
		add(&batch, o.batch)
		w.present[o.id] = o.batch
	}
	state, change, problems := w.table.Update(batch)
	w.problem = problems
	return state, change
}

// ids are those of all objects but the Node, which stays.
func (w *world) ids() []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(w.present)), func(id string) bool {
		return strings.HasPrefix(id, "Node ")
	})
}

// order arranges a step's objects into the updates by which they arrive.
type order func([]object) [][]object

func allAtOnce(objects []object) [][]object { return [][]object{objects} }

// servicesFirst and slicesFirst deliver one object at a time.
func servicesFirst(objects []object) [][]object { return oneByOne(objects, false) }
func slicesFirst(objects []object) [][]object   { return oneByOne(objects, true) }

func oneByOne(objects []object, reverse bool) [][]object {
	sorted := slices.SortedStableFunc(slices.Values(objects), func(a, b object) int {
		return strings.Compare(b.kind(), a.kind()) // Service, Node, EndpointSlice
	})
	if reverse {
		slices.Reverse(sorted)
	}
	return slices.Collect(slices.Chunk(sorted, 1))
}
