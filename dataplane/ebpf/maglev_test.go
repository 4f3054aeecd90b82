package ebpf

import (
	"fmt"
	"math"
	"net/netip"
	"testing"

	"fairlead.dev/fairlead/model"
)

func backendsOf(weights ...uint16) (out []model.Backend) {
	for i, w := range weights {
		a := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, byte(i / 250), byte(1 + i%250)}), 8080)
		out = append(out, model.Backend{Addr: a.Addr(), Port: a.Port(), Weight: w})
	}
	return out
}

func ones(n int) (weights []uint16) {
	for range n {
		weights = append(weights, 1)
	}
	return weights
}

// table is who has each turn.
func table(backends []model.Backend) []netip.AddrPort {
	var owners []netip.AddrPort
	for _, i := range maglev(turnsFor(len(backends)), backends) {
		owners = append(owners, backends[i].AddrPort())
	}
	return owners
}

// Each backend has its share of the turns, by weight.
func TestMaglev_shares(t *testing.T) {
	for name, weights := range map[string][]uint16{
		"one": {1}, "two": ones(2), "ten": ones(10), "many": ones(300), "weights": {1, 2, 3, 100}, "extreme": {65535, 6553, 655},
	} {
		backends, total, got := backendsOf(weights...), 0.0, map[netip.AddrPort]float64{}
		owners := table(backends)
		for _, w := range weights {
			total += float64(w)
		}
		for _, o := range owners {
			got[o]++
		}
		for i, b := range backends {
			want := float64(weights[i]) / total * float64(len(owners))
			if math.Abs(got[b.AddrPort()]-want) > 2 {
				t.Errorf("%s: backend %d has %v of %d turns, not %.1f", name, i, got[b.AddrPort()], len(owners), want)
			}
		}
	}
}

// When one of n backends goes, its clients find others, and of those of others few do: at most three in a hundred.
func TestMaglev_disruption(t *testing.T) {
	for _, n := range []int{2, 5, 10, 40, 300} {
		backends := backendsOf(ones(n)...)
		before := table(backends)
		for _, gone := range []int{0, n / 2, n - 1} {
			after := table(append(append([]model.Backend(nil), backends[:gone]...), backends[gone+1:]...))
			moved := 0
			for i := range before {
				if before[i] != backends[gone].AddrPort() && before[i] != after[i*len(after)/len(before)] {
					moved++
				}
			}
			if part := float64(moved) / float64(len(before)); part > 0.03 {
				t.Errorf("backend %d of %d goes, and %.1f %% of the clients of others move", gone, n, 100*part)
			}
		}
	}
}

// hashOf is what the programs' function hash says of an address.
func hashOf(a netip.Addr) uint32 {
	w := address(a).Word
	return uint32(mix(mix(uint64(w[0])<<32|uint64(w[1])) ^ (uint64(w[2])<<32 | uint64(w[3]))))
}

// The programs have a client reach the backend that the table of its pool's backends says, each pool at its own port.
func TestMaglev_packets(t *testing.T) {
	const pools = 3
	rows, backends := "", backendsOf(1, 2, 3, 4, 5, 6, 7)
	for i := range pools {
		rows += fmt.Sprintf("pool default/web:%d cluster scheduler mh\n", i)
		rows += fmt.Sprintf("frontend 203.0.113.1:%d/tcp any forward default/web:%d cluster snat never\n", 80+i, i)
		for _, b := range backends {
			rows += fmt.Sprintf("backend default/web:%d cluster %s weight %d\n", i, b.AddrPort(), b.Weight)
		}
	}
	r := newPacketRunWith(t, rows, packetOptions{Translations: 1 << 14})
	owners := table(backends)
	for i := range 300 {
		client := netip.AddrFrom4([4]byte{198, 51, 100, byte(i)})
		want := owners[uint64(hashOf(client))*uint64(len(owners))>>32]
		for pool := range pools {
			r.play(fmt.Sprintf("lan tcp %[1]s:%[2]d > 203.0.113.1:%[3]d S -> tcp %[1]s:%[2]d > %[4]s S",
				client, 4000+1000*pool+i, 80+pool, want))
		}
	}
}

// Tables take as much as there are different backends, a hundred turns for each, and not as much as there are pools.
func TestMaglev_memory(t *testing.T) {
	const pools = 4700 // of which each had 131 kB: 616 MB
	bytes := func(scheduler string, ports int) (sum uint64) {
		s := model.NewState()
		for i := range pools {
			pool := model.Pool{Scheduler: scheduler, Backends: backendsOf(1, 1)}
			for j := range pool.Backends {
				pool.Backends[j].Port = uint16(8000 + i%ports)
			}
			s.Pools[model.PoolID{Service: fmt.Sprintf("default/web:%d", i)}] = pool
		}
		for _, m := range newSet(t, s).Maps {
			info, err := m.Info()
			if err != nil {
				t.Fatal(err)
			}
			n, _ := info.Memlock()
			sum += n
		}
		return sum
	}
	plain := bytes("", pools)
	for ports, most := range map[int]uint64{1: 1 << 17, 10: 1 << 18, pools: 24 << 20} {
		more := bytes(byClient, ports) - plain
		t.Logf("%d pools, %d sets of backends: %d kB more than without the scheduler", pools, ports, more/1000)
		if more > most {
			t.Errorf("%d pools with %d sets of backends take %d bytes more, not %d at most", pools, ports, more, most)
		}
	}
}

// A table stays while a pool chooses by it, and its memory is used again.
func TestMaglev_shared(t *testing.T) {
	rows := func(a, b string) string {
		s := ""
		for pool, backend := range map[string]string{"a": a, "b": b} {
			s += fmt.Sprintf("pool default/web:%s cluster scheduler mh\nbackend default/web:%[1]s cluster %[2]s\n"+
				"backend default/web:%[1]s cluster 10.244.1.1:80\n", pool, backend)
		}
		return s + "frontend 203.0.113.1:80/tcp any forward default/web:a cluster snat never\n" +
			"frontend 203.0.113.1:81/tcp any forward default/web:b cluster snat never\n"
	}
	r := newPacketRun(t, rows("10.244.1.2:80", "10.244.1.2:80"))
	steps := []string{"10.244.1.2:80", "10.244.1.3:80", "10.244.1.4:80", "10.244.1.3:80"}
	for i := range 400 { // more changes than there is room for tables
		a, b := steps[i%4], steps[i/2%4]
		s, err := model.ParseState(rows(a, b))
		if err == nil {
			err = r.tables.apply(s, model.Diff(r.rows, s))
		}
		if err != nil {
			t.Fatal(err)
		}
		r.rows = s
		want := 2
		if a == b {
			want = 1
		}
		if n := len(r.tables.turns); n != want {
			t.Fatalf("two pools, with %s and %s, have %d tables", a, b, n)
		}
	}
	drifts, err := r.tables.audit(r.rows, true)
	if err != nil || len(drifts) > 0 {
		t.Error(drifts, err)
	}
}
