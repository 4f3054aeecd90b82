package ebpf

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/model"
)

const audited = `
frontend 10.96.0.10:80/tcp any forward default/web:http cluster snat offcluster
backend default/web:http cluster 10.244.1.11:8080 local
backend default/web:http cluster 10.244.2.13:8080
guard 10.96.0.10/32 reject
guard 10.97.0.0/16 drop
pods 10.244.0.0/16
`

// manySources is how many may use a frontend: more than the kernel is told at once, or reads at once.
const manySources = batch + readStep

// auditedRows are the rows above, and a frontend for many sources.
func auditedRows(t *testing.T) *model.State {
	rows := []byte(audited + "frontend 203.0.113.2:80/tcp any forward default/web:http cluster snat never allow ")
	for i := range manySources {
		rows = fmt.Appendf(rows, "198.%d.%d.0/24,", i/256, i%256)
	}
	s, err := model.ParseState(strings.TrimSuffix(string(rows), ","))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// damage is done to tables that hold the rows above, and told by these drifts.
type damage struct {
	do   func(t *tables, p *pool) error
	want string
}

func damages() map[string]damage {
	const web, backend = "frontend 10.96.0.10:80/tcp any", "backend default/web:http cluster 10.244.2.13:8080"
	const forward = "forward default/web:http cluster snat offcluster"
	const webPool = "pool default/web:http cluster: is something else, should be [10.244.1.11:8080 local 10.244.2.13:8080]"
	limited := model.Key{Addr: netip.MustParseAddr("203.0.113.2"), Port: 80, Protocol: model.TCP}
	key := frontendKey(model.Key{Addr: netip.MustParseAddr("10.96.0.10"), Port: 80, Protocol: model.TCP})
	return map[string]damage{
		"none": {func(*tables, *pool) error { return nil }, ""},
		"a frontend is gone": {func(t *tables, _ *pool) error {
			return t.Maps[objectsMapFrontends].Delete(key)
		}, web + ": missing: " + forward},
		"another verdict": {func(t *tables, _ *pool) error {
			v := objectsFrontend{Key: key}
			v.Any.Verdict = uint8(model.Drop)
			return t.Maps[objectsMapFrontends].Put(key, v)
		}, web + ": is something else, should be " + forward},
		"another backend in a slot": {func(t *tables, p *pool) error {
			t.slots[p.first+1] = t.slots[p.first]
			return nil
		}, backend + ": is something else, should be as in its pool\n" + webPool},
		"affinity": {func(t *tables, p *pool) error {
			t.entries[p.number].Affinity = 60
			return nil
		}, webPool},
		"a member is gone": {func(t *tables, p *pool) error {
			return t.Maps[objectsMapMembers].Delete(p.member(netip.MustParseAddrPort("10.244.2.13:8080")))
		}, backend + ": missing: known to the pool"},
		"a guard of an address is gone": {func(t *tables, _ *pool) error {
			return t.Maps[objectsMapFrontends].Delete(hostKey(netip.MustParseAddr("10.96.0.10")))
		}, "guard 10.96.0.10/32: missing: reject"},
		"a guard of a range is gone": {func(t *tables, _ *pool) error {
			return t.Maps[objectsMapGuards].Delete(guardKey(netip.MustParsePrefix("10.97.0.0/16")))
		}, "guard 10.97.0.0/16: missing: drop"},
		"pods are gone": {func(t *tables, _ *pool) error {
			return t.Maps[packetsMapPods].Delete(guardKey(netip.MustParsePrefix("10.244.0.0/16")))
		}, "pods 10.244.0.0/16: missing: known (1)"},
		"a source is gone": {func(t *tables, _ *pool) error {
			return t.Maps[packetsMapSources].Delete(sourceKey(limited, model.Internal, netip.MustParsePrefix("198.3.7.0/24")))
		}, "frontend 203.0.113.2:80/tcp allow 198.3.7.0/24: missing: known (1)"},
		"a source more": {func(t *tables, _ *pool) error {
			return t.Maps[packetsMapSources].Put(sourceKey(limited, model.Any, netip.MustParsePrefix("0.0.0.0/0")), uint32(1))
		}, "frontend 203.0.113.2:80/tcp allow 0.0.0.0/0: surplus: known (1)"},
	}
}

// An audit of every row tells each kind of damage, in the words of the row.
func TestTables_audit(t *testing.T) {
	for name, d := range damages() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := auditedRows(t)
			tables := newSet(t, s)
			if err := d.do(tables, tables.pools[model.PoolID{Service: "default/web:http"}]); err != nil {
				t.Fatal(err)
			}
			drifts, err := tables.audit(s, true)
			if err != nil {
				t.Fatal(err)
			}
			var lines []string
			for _, drift := range drifts {
				lines = append(lines, drift.String())
			}
			slices.Sort(lines)
			if got := strings.Join(lines, "\n"); got != d.want {
				t.Errorf("drifts\n%s\nwant\n%s", got, d.want)
			}
		})
	}
}
