package iptables

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// noPorts is a protocol for which we ask about ports in a way that the kernel refuses: it has none.
const noPorts model.Protocol = 99

// with is a copy of a State with a row for each of some destinations.
func with(t *testing.T, text string, f model.Frontend, keys ...model.Key) *model.State {
	t.Helper()
	s := parse(t, text)
	for _, k := range keys {
		s.Frontends[k] = f
	}
	return s
}

func destination(address string, port uint16) model.Key {
	return model.Key{Addr: netip.MustParseAddr(address), Protocol: noPorts, Port: port}
}

// leafRows are so few that they are in one chain of each table.
const leafRows = `
frontend 10.96.0.1:80/tcp any forward default/a: cluster snat never
frontend 10.96.0.2:80/tcp any forward default/a: cluster snat never
frontend 10.96.0.4:80/udp any forward default/a: cluster snat never
frontend 10.96.0.5:80/tcp any reject default/none:
frontend 10.96.0.6:80/tcp any reject default/none:
pool default/a: cluster
backend default/a: cluster 10.244.1.1:8080
guard 10.96.0.1/32 reject
`

// portRows are a tree of ports.
func portRows() string {
	text := leafRows
	for i := range 40 {
		text += fmt.Sprintf("frontend 10.96.0.3:%d/tcp any forward default/a: cluster snat never\n", 100+i)
	}
	return text
}

// TestPlane_refusedRule has a rule that the kernel does not take beside others in a chain: these are in force.
func TestPlane_refusedRule(t *testing.T) {
	forward := model.Frontend{Service: "default/bad:", Verdict: model.Forward, Pool: model.PoolID{Service: "default/a:"}}
	reject := model.Frontend{Service: "default/bad:", Verdict: model.Reject}
	tests := map[string]struct {
		text   string
		row    model.Frontend
		bad    []model.Key
		inText string
	}{
		"forwarded": {leafRows, forward, []model.Key{destination("10.96.0.3", 80)}, "-d 10.96.0.3/32 -p protocol 99"},
		"rejected":  {leafRows, reject, []model.Key{destination("10.96.0.5", 81)}, "-d 10.96.0.5/32 -p protocol 99"},
		"two": {leafRows, reject, []model.Key{destination("10.96.0.5", 81), destination("10.96.0.6", 82)},
			"-d 10.96.0.6/32 -p protocol 99"},
		"port":  {portRows(), forward, []model.Key{destination("10.96.0.3", 81)}, "--dport 81 "},
		"ports": {portRows(), reject, manyPorts(), "--dport 0:127 -g KUBE-PORTS-"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			onBoth(t, func(t *testing.T, b Backend) {
				before := parse(t, test.text)
				p := newPlane(t, Options{Backend: b}, dataplane.Config{})
				check(t, p.Sync(context.Background(), before))
				want := destinations(save(t, b))
				s := with(t, test.text, test.row, test.bad...)
				partlyRefused(t, p.Apply(context.Background(), s, model.Diff(before, s)), test.inText)
				partlyRefused(t, p.Sync(context.Background(), s), test.inText)
				if got := destinations(save(t, b)); got != want {
					t.Errorf("in force are\n%s\nwant\n%s", got, want)
				}
				check(t, p.Remove(context.Background()))
				partlyRefused(t, p.Sync(context.Background(), s), test.inText) // where no chain was
				if got := destinations(save(t, b)); got != want {
					t.Errorf("made anew, in force are\n%s\nwant\n%s", got, want)
				}
				check(t, p.Apply(context.Background(), before, model.Diff(s, before)))
				if drifts := audit(t, b, before); len(drifts) > 0 {
					t.Errorf("drifts: %v", drifts)
				}
				check(t, errors.Join(p.Remove(context.Background()), p.Close()))
			})
		})
	}
}

// partlyRefused fails unless an error names what is refused, and nothing else.
func partlyRefused(t *testing.T, err error, text string) {
	t.Helper()
	if !errors.Is(err, dataplane.ErrPartial) || !strings.Contains(err.Error(), text) {
		t.Errorf("want ErrPartial that says %q, got %v", text, err)
	} else if strings.Contains(err.Error(), "default/a") {
		t.Errorf("this blames default/a: %v", err)
	}
}

// manyPorts are those of an address that become a tree of their own.
func manyPorts() (keys []model.Key) {
	for port := range uint16(40) {
		keys = append(keys, destination("10.96.0.7", 80+port))
	}
	return keys
}

// destinations are the rules that say where rows of default/a and default/none lead.
func destinations(saved string) string {
	var lines []string
	for line := range strings.Lines(saved) {
		if strings.Contains(line, "default/a:") || strings.Contains(line, "default/none:") {
			lines = append(lines, line)
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "")
}

// TestPlane_manyRefused has the kernel refuse more than are told apart: what is healthy is in force at once, and
// changes go on.
func TestPlane_manyRefused(t *testing.T) {
	const many = 2*maxRefusals + 8
	onBoth(t, func(t *testing.T, b Backend) {
		before := parse(t, "")
		p := newPlane(t, Options{Backend: b}, dataplane.Config{})
		check(t, p.Sync(context.Background(), before))
		var bad []model.Key
		healthy, sticky := "", ""
		for i := range many {
			bad = append(bad, destination(fmt.Sprintf("10.96.1.%d", 2*i), 80))
			name := fmt.Sprintf("default/good-%d:", i)
			healthy += fmt.Sprintf("frontend 10.96.1.%d:80/tcp any forward %s cluster snat never\npool %[2]s cluster\n"+
				"backend %[2]s cluster 10.244.1.%[1]d:80\n", 2*i+1, name)
			name = fmt.Sprintf("default/sticky-%d:", i)
			sticky += fmt.Sprintf("frontend 10.96.2.%d:80/tcp any forward %s cluster snat never\n"+
				"pool %[2]s cluster affinity 1m0s\nbackend %[2]s cluster 10.244.2.%[1]d:80\n", i, name)
		}
		s := with(t, healthy+sticky, model.Frontend{Service: "default/bad:", Verdict: model.Reject}, bad...)
		for id, pool := range s.Pools {
			if pool.Affinity > 0 { // the plane thinks that it has these sets
				c := chooser{id: entry{pool: id, protocol: model.TCP}.id()}
				p.ipsets.indexes[c.setName(pool.Backends[0])] = invalidSet - 1
			}
		}
		err := p.Apply(context.Background(), s, model.Diff(before, s))
		if !errors.Is(err, dataplane.ErrPartial) || strings.Contains(err.Error(), "good") {
			t.Errorf("want ErrPartial about others, got %v", err)
		}
		served(t, b, "10.244.1.", many)
		next := s.Clone()
		id := model.PoolID{Service: "default/good-3:"}
		next.Pools[id] = model.Pool{Backends: []model.Backend{{Addr: netip.MustParseAddr("10.244.1.200"), Port: 80, Weight: 1}}}
		check(t, p.Apply(context.Background(), next, model.Diff(s, next)))
		if !strings.Contains(save(t, b), "10.244.1.200") {
			t.Error("the next change is not in force")
		}
		if err = p.Sync(context.Background(), next); !errors.Is(err, dataplane.ErrPartial) { // it looks for the sets
			t.Errorf("want ErrPartial, got %v", err)
		}
		served(t, b, "10.244.1.", many)
		served(t, b, "10.244.2.", many)
		if saved := save(t, b); strings.Contains(saved, chainTrial) {
			t.Errorf("the chain for trials is left:\n%s", saved)
		}
		check(t, errors.Join(p.Remove(context.Background()), p.Close()))
	})
}

// served fails unless there is a translation for each of so many backends.
func served(t *testing.T, b Backend, prefix string, want int) {
	t.Helper()
	saved := save(t, b)
	if got := strings.Count(saved, "--to-destination "+prefix); got != want {
		t.Errorf("%d backends %s… are in force, want %d:\n%s", got, prefix, want, saved)
	}
}
