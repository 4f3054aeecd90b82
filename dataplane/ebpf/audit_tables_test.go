package ebpf

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/model"
)

// An audit of every row tells each kind of damage, in the words of the row.
func TestTables_audit(t *testing.T) {
	const rows = `
frontend 10.96.0.10:80/tcp any forward default/web:http cluster snat offcluster
backend default/web:http cluster 10.244.1.11:8080 local
backend default/web:http cluster 10.244.2.13:8080
guard 10.96.0.10/32 reject
guard 10.97.0.0/16 drop
pods 10.244.0.0/16
`
	web := frontendKey(model.Key{Addr: netip.MustParseAddr("10.96.0.10"), Port: 80, Protocol: model.TCP})
	id := model.PoolID{Service: "default/web:http"}
	member := func(p *pool) objectsMemberKey { return p.member(netip.MustParseAddrPort("10.244.2.13:8080")) }
	for name, c := range map[string]struct {
		damage func(t *tables, p *pool) error
		want   string
	}{
		"none": {func(*tables, *pool) error { return nil }, ""},
		"a frontend is gone": {
			func(t *tables, _ *pool) error { return t.Maps[objectsMapFrontends].Delete(web) },
			"frontend 10.96.0.10:80/tcp any: missing: forward default/web:http cluster snat offcluster",
		},
		"another verdict": {
			func(t *tables, _ *pool) error {
				v := objectsFrontend{Key: web}
				v.Any.Verdict = uint8(model.Drop)
				return t.Maps[objectsMapFrontends].Put(web, v)
			},
			"frontend 10.96.0.10:80/tcp any: is something else, should be forward default/web:http cluster snat offcluster",
		},
		"another backend in a slot": {
			func(t *tables, p *pool) error { t.slots[p.first+1] = t.slots[p.first]; return nil },
			"backend default/web:http cluster 10.244.2.13:8080: is something else, should be as the pool has it\n" +
				"pool default/web:http cluster: is something else, should be [10.244.1.11:8080 local 10.244.2.13:8080]",
		},
		"affinity": {
			func(t *tables, p *pool) error { t.entries[p.number].Affinity = 60; return nil },
			"pool default/web:http cluster: is something else, should be [10.244.1.11:8080 local 10.244.2.13:8080]",
		},
		"a member is gone": {
			func(t *tables, p *pool) error { return t.Maps[objectsMapMembers].Delete(member(p)) },
			"backend default/web:http cluster 10.244.2.13:8080: missing: known to the pool",
		},
		"a guard of an address is gone": {
			func(t *tables, _ *pool) error {
				return t.Maps[objectsMapFrontends].Delete(hostKey(netip.MustParseAddr("10.96.0.10")))
			},
			"guard 10.96.0.10/32: missing: reject",
		},
		"a guard of a range is gone": {
			func(t *tables, _ *pool) error {
				return t.Maps[objectsMapGuards].Delete(guardKey(netip.MustParsePrefix("10.97.0.0/16")))
			},
			"guard 10.97.0.0/16: missing: drop",
		},
		"pods are gone": {
			func(t *tables, _ *pool) error {
				return t.Maps[packetsMapPods].Delete(guardKey(netip.MustParsePrefix("10.244.0.0/16")))
			},
			"pods 10.244.0.0/16: missing: known (1)",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, err := model.ParseState(rows)
			if err != nil {
				t.Fatal(err)
			}
			tables := newSet(t, s)
			if err := c.damage(tables, tables.pools[id]); err != nil {
				t.Fatal(err)
			}
			drifts, err := tables.audit(s, true)
			if err != nil {
				t.Fatal(err)
			}
			var lines []string
			for _, d := range drifts {
				lines = append(lines, d.String())
			}
			slices.Sort(lines)
			if got := strings.Join(lines, "\n"); got != c.want {
				t.Errorf("drifts\n%s\nwant\n%s", got, c.want)
			}
		})
	}
}
