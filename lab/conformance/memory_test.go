package conformance

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"fairlead.dev/fairlead/dataplane/memory"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// These tests leave out some tests of real planes, because a kernel that is a map has no such thing:
//
//   - RunSockets, RunAccelerated, RunOnlySockets: sockets in a cgroup, drivers. RunHiding: a plane behind another.
//   - TestUnanswered_both: datagrams that wait for an answer. Here each packet has its answer at once.
//   - TestIPVS_…, TestSessions_left, sidebyside: objects of one plane's kernel, planes behind it, kube-proxy.
//   - The suites of the daemon: they open planes by the names of modes.
//   - lab/integration, lab/attack: the real program.

// natures are those of planes of memory. The names are those by which cases skip them.
func natures() map[string]memory.Nature {
	return map[string]memory.Nature{
		"memory-tracked": memory.Tracked, "memory-tabled": memory.Tabled, "memory-carried": memory.Relayed,
	}
}

// TestMemory plays every case on a kernel that is a map.
func TestMemory(t *testing.T) {
	t.Parallel()
	for name, n := range natures() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run(t, name, stage{on: inMemory(n, false), all: true, has: func(model.Protocol) bool { return true }})
		})
	}
}

func TestMemory_random(t *testing.T) {
	t.Parallel()
	for name, n := range natures() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			runRandom(t, inMemory(n, false), testbed.Spec{}, 200)
		})
	}
}

// TestMemory_notices is TestRandom_notices of the cluster that Memory acts as.
func TestMemory_notices(t *testing.T) {
	t.Parallel()
	for name, lie := range lies() {
		t.Run(name, func(t *testing.T) {
			node := &Memory{}
			notices(t, kernel{at: node, new: lying(node.New, lie)})
		})
	}
}

func TestMemory_faults(t *testing.T) {
	t.Parallel()
	for name, n := range natures() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			runFaults(t, inMemory(n, n == memory.Relayed), testbed.Spec{}, 1)
		})
	}
}

func TestMemory_vandalism(t *testing.T) {
	t.Parallel()
	runVandalism(t, inMemory(memory.Tracked, false), testbed.Spec{}, memoryVandal)
}

// memoryVandal breaks rows.
func memoryVandal(_ context.Context, s *Site) (d Deed, err error) {
	s.at.(*Memory).Kernel.Do(func(rows *model.State) {
		switch s.IntN(4) {
		case 0:
			if keys := slices.SortedFunc(maps.Keys(rows.Frontends), model.Key.Compare); len(keys) > 0 {
				key := keys[s.IntN(len(keys))]
				d = Deed{"frontend deleted", []string{fmt.Sprintf("frontend %s", key)}}
				delete(rows.Frontends, key)
			}
		case 1:
			if ids := slices.SortedFunc(maps.Keys(rows.Pools), model.PoolID.Compare); len(ids) > 0 {
				id := ids[s.IntN(len(ids))]
				pool := rows.Pools[id]
				i := s.IntN(len(pool.Backends))
				d = Deed{"backend deleted", []string{pool.Backends[i].AddrPort().String()}}
				pool.Backends = slices.Delete(slices.Clone(pool.Backends), i, i+1)
				rows.Pools[id] = pool
			}
		case 2:
			prefix := netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 16, 0, byte(s.IntN(256))}), 32)
			d = Deed{"guard added", []string{"guard " + prefix.String()}}
			rows.Guards[prefix] = model.Drop
		case 3:
			d = Deed{"all guards deleted", []string{"guard"}}
			if len(rows.Guards) == 0 {
				d = Deed{}
			}
			clear(rows.Guards)
		}
	})
	return d, nil
}
