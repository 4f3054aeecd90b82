package nftables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/localnet"
	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/lab/testbed/nstest"
	"fairlead.dev/fairlead/model"
)

// newPlane opens a plane that is closed, and whose objects are removed, after the test.
func newPlane(t *testing.T, c dataplane.Config) *Plane {
	p, err := New(c)
	if err != nil {
		t.Error(err)
		runtime.Goexit()
	}
	return p.(*Plane)
}

func parse(t *testing.T, text string) *model.State {
	t.Helper()
	s, err := model.ParseState(text)
	if err != nil {
		t.Error(err)
		runtime.Goexit()
	}
	return s
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
		runtime.Goexit()
	}
}

func runNFT(t *testing.T, arguments ...string) string {
	t.Helper()
	out, err := exec.Command("nft", arguments...).CombinedOutput()
	if err != nil {
		t.Errorf("nft %s: %v: %s", arguments, err, out)
	}
	return string(out)
}

// audit has a plane that knows nothing yet compare the kernel with s.
func audit(t *testing.T, s *model.State) (lines []string) {
	t.Helper()
	p := newPlane(t, dataplane.Config{})
	defer p.Close()
	report, err := p.Audit(context.Background(), s, dataplane.Quick)
	check(t, err)
	for _, d := range report.Drifts {
		lines = append(lines, d.String())
	}
	return lines
}

const example = `
backend default/web:http cluster 10.244.1.2:8080 local
backend default/web:http cluster 10.244.2.2:8080
backend default/web:http cluster 10.244.2.3:8080 weight 2
backend default/web:http cluster6 [fd00::1]:8080
backend default/web:http local 10.244.1.2:8080 local
frontend 10.96.0.10:80/tcp any forward default/web:http cluster snat offcluster
frontend 10.96.0.10:81/tcp any reject default/web:admin
frontend 10.96.0.10:82/udp any drop default/web:none
frontend 192.0.2.1:30080/tcp any forward default/web:http local snat never allow 10.0.0.0/8,192.0.2.0/24
frontend 192.0.2.1:30080/tcp internal forward default/web:http cluster snat always
frontend 127.0.0.1:30080/tcp any forward default/web:http cluster snat always
frontend [fd00::10]:80/tcp any forward default/web:http cluster6 snat offcluster allow fd00::/64
guard 10.96.0.0/16 drop
guard 10.96.0.10/32 reject
guard 10.96.7.0/24 reject
guard fd00::10/128 reject
pods 10.244.0.0/16
pods interface cali*
pods interface cbr0
pool default/web:http cluster affinity 3h0m0s
pool default/web:http cluster6
pool default/web:http local
`

func TestPlane_whatItInstallsCanBeListed(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		p := newPlane(t, dataplane.Config{})
		defer p.Close()
		s := parse(t, example)
		check(t, p.Sync(context.Background(), s))
		list := runNFT(t, "list ruleset")
		for _, want := range []string{
			"10.96.0.10 . tcp . 80 : ",
			"dnat ip to meta priority & 8003:ffff . numgen random mod 1 map @slots",
			"update @affinity-32772 { ip saddr timeout 3h : meta priority }",
			"ip daddr . meta l4proto . th dport . ip saddr != @sources counter packets 0 bytes 0 drop", // whose elements nft prints as numbers
			"elements = { 255211815836608127482530978773845671936-255211815836608127482530978773862449151",
			"elements = { 10.96.0.0-10.96.6.255, 10.96.8.0-10.96.255.255 }",
			"iifname \"cali*\" goto internal",
		} {
			if !strings.Contains(list, want) {
				t.Errorf("nft list ruleset does not print %q", want)
			}
		}
		if t.Failed() {
			t.Log(list)
		}
	})
}

func TestPlane_restartChangesNothing(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		s := parse(t, example)
		p := newPlane(t, dataplane.Config{})
		check(t, p.Sync(context.Background(), s))
		check(t, p.Close())
		before := runNFT(t, "-a", "list ruleset")
		p = newPlane(t, dataplane.Config{})
		defer p.Close()
		check(t, p.Sync(context.Background(), s))
		// Handles are in the listing: an object that was made anew would have another one.
		if after := runNFT(t, "-a", "list ruleset"); after != before {
			t.Errorf("before the restart:\n%s\nafter:\n%s", before, after)
		}
	})
}

// A new process reads ahead of its first State, and reads again what was changed since. Rows are right in any case.
func TestPlane_readAhead(t *testing.T) {
	const nothing, removed = "nothing", "the plane itself removes all"
	for _, change := range []string{
		nothing, removed,
		"add table ip other",
		"delete element ip fairlead frontends { 10.96.0.10 . tcp . 80 }",
		"add element ip fairlead drop-addresses { 10.96.0.10 }",
		"flush chain ip fairlead services",
		"flush map ip6 fairlead frontends",
		"flush ruleset",
		"delete table ip fairlead; add table ip fairlead; add map ip fairlead frontends { type ipv4_addr : mark; }",
	} {
		t.Run(change, func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				p := newPlane(t, dataplane.Config{})
				check(t, p.Sync(context.Background(), parse(t, example)))
				check(t, p.Close())
				reads := 0
				p = newPlane(t, dataplane.Config{Fault: func(operation string) error {
					if operation == "nftables list" {
						reads++
					}
					return nil
				}})
				defer p.Close()
				p.ReadAhead(context.Background())
				switch change {
				case nothing:
				case removed:
					check(t, p.Remove(context.Background()))
				default:
					runNFT(t, change)
				}
				reads = 0
				now := parse(t, strings.ReplaceAll(example, "10.244.2.2:8080", "10.244.2.9:8080"))
				check(t, p.Sync(context.Background(), now))
				if again := reads > 0; again != (change != nothing) {
					t.Errorf("Sync reads again what was read ahead: %t", again)
				}
				if drifts := audit(t, now); len(drifts) > 0 {
					t.Errorf("after Sync:\n%s", strings.Join(drifts, "\n"))
				}
			})
		})
	}
}

// Where more elements need another counter than are worth remembering, Sync exchanges them as well.
func TestPlane_readAheadOfOtherCounters(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		s := model.NewState()
		addLarge(s, 20, 1000)
		p := newPlane(t, dataplane.Config{})
		check(t, p.Sync(context.Background(), s))
		check(t, p.Close())
		for range 2 { // the second one finds what the first one has made
			p = newPlane(t, dataplane.Config{Counters: dataplane.PerBackend})
			p.ReadAhead(context.Background())
			check(t, p.Sync(context.Background(), s))
			report, err := p.Audit(context.Background(), s, dataplane.Full)
			check(t, errors.Join(err, p.Close()))
			if n := len(report.Drifts); n > 0 {
				t.Errorf("%d drifts after Sync, the first: %s", n, report.Drifts[0])
			}
		}
	})
}

// Also classes that no frontend uses at the moment, and that stay for those to come, have the new mark.
func TestPlane_newMark(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		s := parse(t, example)
		p := newPlane(t, dataplane.Config{})
		check(t, p.Sync(context.Background(), s))
		check(t, p.Close())
		p = newPlane(t, dataplane.Config{Mark: 1 << 20})
		defer p.Close()
		check(t, p.Sync(context.Background(), parse(t, "guard 10.96.0.0/16 drop\n")))
		rules := runNFT(t, "list ruleset")
		if strings.Contains(rules, "0x00004000") || !strings.Contains(rules, "0x00100000") {
			t.Error("the rules have not the new mark alone:\n", rules)
		}
	})
}

func TestPlane_removeLeavesNothing(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		p := newPlane(t, dataplane.Config{})
		defer p.Close()
		check(t, p.Sync(context.Background(), parse(t, example)))
		if on, err := os.ReadFile(localnet.File); err != nil || string(on) != "1\n" {
			t.Errorf("route_localnet is %q (%v) with a frontend on 127.0.0.1", on, err)
		}
		runNFT(t, "add table ip other; add chain ip other mine")
		check(t, p.Close())
		p = newPlane(t, dataplane.Config{})
		for range 2 {
			check(t, p.Remove(context.Background()))
		}
		if list := runNFT(t, "list ruleset"); list != "table ip other {\n\tchain mine {\n\t}\n}\n" {
			t.Errorf("left behind:\n%s", list)
		}
		if on, _ := os.ReadFile(localnet.File); string(on) != "0\n" {
			t.Errorf("route_localnet is %q after Remove", on)
		}
	})
}

// An unprivileged process takes over the objects that a privileged one has prepared, and Remove knows of them.
func TestPrepare(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		for range 2 {
			check(t, prepare(dataplane.Config{}))
		}
		if on, err := os.ReadFile(localnet.File); err != nil || string(on) != "1\n" {
			t.Errorf("route_localnet is %q (%v)", on, err)
		}
		p := newPlane(t, dataplane.Config{})
		defer p.Close()
		check(t, p.Sync(context.Background(), parse(t, example)))
		check(t, p.Remove(context.Background()))
		if list := runNFT(t, "list ruleset"); list != "" {
			t.Errorf("left behind:\n%s", list)
		}
		if off, _ := os.ReadFile(localnet.File); string(off) != "0\n" {
			t.Errorf("route_localnet is %q after Remove", off)
		}
	})
}

// Audit sees every change that another program makes to our tables, and Sync repairs it.
func TestPlane_repairs(t *testing.T) {
	damages := []string{
		"delete element ip fairlead frontends { 10.96.0.10 . tcp . 80 }",
		"delete element ip fairlead internal-frontends { 192.0.2.1 . tcp . 30080 }",
		"flush map ip fairlead SLOTS",
		"add element ip fairlead slots { 0:11 . 0 : 10.9.9.9 . 80 }", // where no pool of that number has its slots
		"flush map ip fairlead choices",
		"flush map ip fairlead choices; flush map ip fairlead backends",
		"flush set ip fairlead sources",
		"flush set ip fairlead hairpin",
		"flush set ip fairlead pods",
		"flush set ip fairlead drop-ranges",
		"flush set ip fairlead reject-addresses",
		"add element ip fairlead drop-addresses { 10.96.0.10 }",
		"add element ip fairlead hairpin { 10.244.2.2 . 10.244.2.2 }",
		"flush map ip fairlead classes",
		"flush chain ip fairlead services",
		"flush chain ip fairlead postrouting; delete chain ip fairlead postrouting",
		"insert rule ip fairlead services drop",
		"add rule ip fairlead forward-snat-never-sources-any drop",
		"add rule ip fairlead CHOOSE drop",
		"flush map ip fairlead choosers",
		"flush map ip fairlead memories",
		"flush chain ip fairlead affinity-32772",
		"flush map ip fairlead memories; flush chain ip fairlead affinity-32772; delete chain ip fairlead affinity-32772; delete map ip fairlead affinity-32772",
		"add map ip fairlead affinity-7 { type ipv4_addr : mark; }",
		"add chain ip fairlead mine",
		"add set ip fairlead mine { type ipv4_addr; }",
		"delete table ip fairlead",
		"delete table ip6 fairlead",
		"flush ruleset",
		"flush table ip6 fairlead",
		"add table ip fairlead { flags dormant; }",
		"add chain ip fairlead prerouting { policy drop; }",
		"add element ip fairlead classes { f:fff0 : drop }",
		"delete table ip fairlead; add table ip fairlead; add map ip fairlead frontends { type ipv4_addr : mark; }",
	}
	for _, damage := range damages {
		t.Run(damage, func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				s := parse(t, example)
				p := newPlane(t, dataplane.Config{})
				defer p.Close()
				check(t, p.Sync(context.Background(), s))
				if report, err := p.Audit(context.Background(), s, dataplane.Quick); err != nil || len(report.Drifts) > 0 {
					t.Errorf("before the damage: %v, %v", report.Drifts, err)
				}
				for id, pool := range p.tables[0].pools {
					if s.Pools[id].Affinity == 0 {
						damage = strings.NewReplacer("SLOTS", shardName(pool.size.shard), "CHOOSE", pool.size.chain()).Replace(damage)
					}
				}
				runNFT(t, damage)
				if report, err := p.Audit(context.Background(), s, dataplane.Quick); err != nil || len(report.Drifts) == 0 {
					t.Errorf("Audit does not see the damage (%v)", err)
				}
				if len(audit(t, s)) == 0 {
					t.Error("Audit of another process does not see the damage")
				}
				check(t, p.Sync(context.Background(), s))
				if drifts := audit(t, s); len(drifts) > 0 {
					t.Errorf("after Sync:\n%s", strings.Join(drifts, "\n"))
				}
			})
		})
	}
}

// addLarge adds so many Services with so many endpoints each.
func addLarge(s *model.State, services, endpoints int) {
	for i := range services {
		id := model.PoolID{Service: fmt.Sprintf("default/large-%d:http", i)}
		pool := model.Pool{}
		for j := range endpoints {
			a := address(false, 10, byte(200+i), byte(j>>8), byte(j))
			pool.Backends = append(pool.Backends, model.Backend{Addr: a, Port: 80, Weight: 1})
		}
		s.Pools[id] = pool
		s.Frontends[model.Key{Addr: address(false, 10, 96, 1, byte(i)), Port: 80, Protocol: model.TCP}] =
			model.Frontend{Service: id.Service, Verdict: model.Forward, Pool: id}
	}
}

// TestPlane_shards: where there are many slots when a table is made, they are in more maps, which a new process finds.
func TestPlane_shards(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		s := parse(t, example)
		addLarge(s, 17, slotsPerShard)
		p := newPlane(t, dataplane.Config{})
		defer p.Close()
		check(t, p.Sync(context.Background(), s))
		if drifts := audit(t, s); len(drifts) > 0 {
			t.Errorf("%d drifts, the first: %s", len(drifts), drifts[0])
		}
		for _, pool := range p.tables[0].pools {
			if pool.slots.len() == slotsPerShard && pool.size.shard >= leastShards { // two of them are, at least
				runNFT(t, "flush map ip fairlead "+shardName(pool.size.shard))
				break
			}
		}
		if drifts := audit(t, s); len(drifts) < slotsPerShard {
			t.Errorf("of at least %d slots that are missing, an audit finds %d", slotsPerShard, len(drifts))
		}
		check(t, p.Sync(context.Background(), s))
		if drifts := audit(t, s); len(drifts) > 0 {
			t.Errorf("%d drifts after Sync, the first: %s", len(drifts), drifts[0])
		}
	})
}

// A change on a ruleset that another program has flushed fails as a whole. More is missing than the objects that it was
// about.
func TestPlane_changeAfterFlush(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		s := parse(t, example)
		p := newPlane(t, dataplane.Config{})
		defer p.Close()
		check(t, p.Sync(context.Background(), s))
		runNFT(t, "flush ruleset")
		next := s.Clone()
		next.Guards[netip.MustParsePrefix("10.96.0.11/32")] = model.Reject
		if err := p.Apply(context.Background(), next, model.Diff(s, next)); err == nil || errors.Is(err, dataplane.ErrPartial) {
			t.Errorf("Apply: %v; want an error that asks for Sync", err)
		}
		check(t, p.Sync(context.Background(), next))
		if drifts := audit(t, next); len(drifts) > 0 {
			t.Errorf("after Sync:\n%s", strings.Join(drifts, "\n"))
		}
	})
}

// All that a tenant can make frontends and pools differ in, together. That is what is done with packets, how many slots
// a pool has, with names and without, and for how long clients are remembered. Nothing is left out.
func TestPlane_manyKinds(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		const kinds = 2500 // more than numbers of any kind that a token has room for, but those of pools
		s := model.NewState()
		for i := range kinds {
			id := model.PoolID{Service: fmt.Sprintf("default/svc-%d", i)}
			pool := model.Pool{}
			for k := range 1 + i%40 {
				weight := uint16(1 + i/40*k%3)
				pool.Backends = append(pool.Backends, model.Backend{Addr: address(false, 10, 244, byte(k>>8), byte(k)), Port: 80, Weight: weight})
			}
			if i%4 == 3 {
				pool.Affinity = time.Duration(i+1) * time.Second
			}
			s.Pools[id] = pool
			f := model.Frontend{Service: id.Service, Verdict: model.Forward, Pool: id, SNAT: model.SNAT(i % 3)}
			if i%2 == 1 {
				f.Allow = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
			}
			key := model.Key{Addr: address(false, 10, 96, byte(i>>8), byte(i)), Port: 80, Protocol: model.TCP, Scope: model.Scope(i / 2 % 2)}
			s.Frontends[key] = f
			key.Port = 81
			s.Frontends[key] = model.Frontend{Service: id.Service, Verdict: model.Reject + model.Verdict(i%2), Allow: f.Allow}
		}
		p := newPlane(t, dataplane.Config{})
		defer p.Close()
		check(t, p.Sync(context.Background(), s))
		if drifts := audit(t, s); len(drifts) > 0 {
			t.Errorf("%d drifts, the first: %s", len(drifts), drifts[0])
		}
		runNFT(t, "list ruleset") // it can be printed
	})
}

// As many endpoints as a slice can have, as heavy as they can be, with weights that have no common divisor: one
// of them is emptied.
func TestPlane_heaviest(t *testing.T) {
	for _, affinity := range []time.Duration{0, time.Hour} {
		nstest.Run(t, func(t *testing.T) {
			s, id := model.NewState(), model.PoolID{Service: "default/web"}
			pool := model.Pool{Affinity: affinity}
			for i := range 1000 {
				a := netip.AddrPortFrom(address(false, 10, 244, byte(i>>8), byte(i)), 80)
				pool.Backends = append(pool.Backends, model.Backend{Addr: a.Addr(), Port: a.Port(), Weight: uint16(256 - i%2)})
			}
			s.Pools[id] = pool
			s.Frontends[model.Key{Addr: address(false, 10, 96, 0, 1), Port: 80, Protocol: model.TCP}] =
				model.Frontend{Service: id.Service, Verdict: model.Forward, Pool: id}
			p := newPlane(t, dataplane.Config{})
			defer p.Close()
			check(t, p.Sync(context.Background(), s))
			next := s.Clone()
			pool.Backends = slices.Clone(pool.Backends)
			pool.Backends[7].Weight = 0
			next.Pools[id] = pool
			check(t, p.Apply(context.Background(), next, model.Diff(s, next)))
			if drifts := audit(t, next); len(drifts) > 0 {
				t.Errorf("%d drifts, the first: %s", len(drifts), drifts[0])
			}
			slots := shardName(p.tables[0].pools[id].size.shard)
			backends := runNFT(t, "list map ip fairlead "+slots)
			if affinity > 0 {
				backends, slots = runNFT(t, "list map ip fairlead backends"), "choices"
			}
			if !strings.Contains(backends, ": 10.244.0.9 . 80") || strings.Contains(backends, ": 10.244.0.7 . 80") {
				t.Errorf("a heavy backend is missing, or one that is emptied is there:\n%s", backends)
			}
			if n := strings.Count(runNFT(t, "list map ip fairlead "+slots), " : "); n > mostSlots*len(pool.Backends) {
				t.Errorf("there are %d elements for %d backends", n, len(pool.Backends))
			}
		})
	}
}

// A row that the kernel refuses is named and does not keep the others out.
func TestPlane_refusedRow(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		s := parse(t, example)
		key := model.Key{Addr: netip.MustParseAddr("10.96.0.10"), Port: 80, Protocol: model.TCP}
		row := s.Frontends[key]
		row.Allow = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("10.1.0.0/16")} // overlap
		s.Frontends[key] = row
		p := newPlane(t, dataplane.Config{})
		defer p.Close()
		err := p.Sync(context.Background(), s)
		if !errors.Is(err, dataplane.ErrPartial) || !strings.Contains(err.Error(), "10.96.0.10") || !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.ENOTEMPTY) {
			t.Errorf("Sync: %v; want the kernel's refusal, with the address", err)
		}
		if drifts := audit(t, s); len(drifts) != 1 || !strings.Contains(drifts[0], "10.96.0.10") {
			t.Errorf("more than the refused element is missing:\n%s", strings.Join(drifts, "\n"))
		}
		next := s.Clone()
		row.Allow = row.Allow[:1]
		next.Frontends[key] = row
		next.Guards[netip.MustParsePrefix("10.97.0.0/16")] = model.Drop
		// The kernel does not have the range that is to go, which is reason enough to look anew at all that it has.
		if err := p.Apply(context.Background(), next, model.Diff(s, next)); err != nil && !errors.Is(err, dataplane.ErrPartial) &&
			!errors.Is(err, unix.ENOENT) {
			t.Errorf("a change after the refusal: %v", err)
		}
		check(t, p.Sync(context.Background(), next))
		if drifts := audit(t, next); len(drifts) > 0 {
			t.Errorf("when the row is mended:\n%s", strings.Join(drifts, "\n"))
		}
	})
}

// A chain of Apply leads to what one Sync makes; any operation may fail, and Sync then repairs.
func TestPlane_randomChanges(t *testing.T) {
	seed := sample.Seed(t)
	nstest.Run(t, func(t *testing.T) {
		random := rand.New(rand.NewPCG(seed, 0))
		var fail float64
		p := newPlane(t, dataplane.Config{Fault: func(string) error {
			if random.Float64() < fail {
				return errors.New("injected")
			}
			return nil
		}})
		defer p.Close()
		state := model.NewState()
		check(t, p.Sync(context.Background(), state))
		fail = 0.1
		for step := range 150 {
			next := randomState(random)
			change := model.Diff(state, next)
			state = next
			for err := p.Apply(context.Background(), state, change); err != nil; {
				err = p.Sync(context.Background(), state)
			}
			if drifts := audit(t, state); len(drifts) > 0 {
				t.Errorf("step %d: state\n%s\ndrifts\n%s", step, state, strings.Join(drifts, "\n"))
				return
			}
		}
		fail = 0
		check(t, p.Remove(context.Background()))
		if list := runNFT(t, "list ruleset"); list != "" {
			t.Errorf("left behind:\n%s", list)
		}
	})
}

// randomState has few possible keys, so that two of them have much in common.
func randomState(r *rand.Rand) *model.State {
	s := model.NewState()
	for range r.IntN(12) {
		v6 := r.IntN(2) == 0
		id := model.PoolID{Service: fmt.Sprintf("default/svc-%d", r.IntN(5)), Local: r.IntN(2) == 0, V6: v6}
		if _, ok := s.Pools[id]; !ok {
			s.Pools[id] = randomPool(r, v6)
		}
		key := model.Key{
			Addr: address(v6, 10, 96, 0, byte(r.IntN(3))), Port: uint16(80 + r.IntN(3)),
			Protocol: []model.Protocol{model.TCP, model.UDP, model.SCTP}[r.IntN(3)], Scope: model.Scope(r.IntN(2)),
		}
		f := model.Frontend{Service: id.Service, Verdict: model.Verdict(1 + r.IntN(3))}
		if f.Verdict == model.Forward {
			f.Pool, f.SNAT = id, model.SNAT(r.IntN(3))
		}
		if r.IntN(3) == 0 {
			f.Allow = randomPrefixes(r, v6)
		}
		s.Frontends[key] = f
	}
	maps.DeleteFunc(s.Pools, func(id model.PoolID, _ model.Pool) bool {
		for _, f := range s.Frontends {
			if f.Verdict == model.Forward && f.Pool == id {
				return false
			}
		}
		return true
	})
	for range r.IntN(6) {
		for _, p := range randomPrefixes(r, r.IntN(2) == 0) {
			s.Guards[p] = model.Reject + model.Verdict(r.IntN(2))
		}
	}
	s.Pods.Prefixes = model.Disjoint(append(randomPrefixes(r, true), randomPrefixes(r, false)...))
	if r.IntN(3) == 0 {
		s.Pods.Interfaces = []string{"cali*"}
	}
	return s
}

func randomPool(r *rand.Rand, v6 bool) model.Pool {
	p := model.Pool{Affinity: time.Duration(r.IntN(3)) * time.Hour}
	for i := range 1 + r.IntN(6) {
		a := netip.AddrPortFrom(address(v6, 10, 244, 1, byte(r.IntN(8))), 8080)
		if i == 0 || r.IntN(2) == 0 {
			p.Backends = append(p.Backends, model.Backend{Addr: a.Addr(), Port: a.Port(), Local: r.IntN(2) == 0, Weight: []uint16{0, 1, 2, 3, 97, 255, 256}[r.IntN(7)]})
		}
	}
	slices.SortFunc(p.Backends, model.Backend.Compare)
	p.Backends = slices.CompactFunc(p.Backends, func(a, b model.Backend) bool { return a.AddrPort() == b.AddrPort() })
	p.Backends[0].Weight = 1
	return p
}

func randomPrefixes(r *rand.Rand, v6 bool) []netip.Prefix {
	prefixes := []netip.Prefix{}
	for range r.IntN(4) {
		a := address(v6, 10, byte(96+r.IntN(4)), byte(r.IntN(4)), byte(r.IntN(4)))
		p, _ := a.Prefix(a.BitLen() - []int{0, 0, 2, 8, 16, 32}[r.IntN(6)])
		prefixes = append(prefixes, p)
	}
	return model.Disjoint(prefixes)
}

func address(v6 bool, a, b, c, d byte) netip.Addr {
	if v6 {
		return netip.AddrFrom16([16]byte{0: 0xfd, 12: a, 13: b, 14: c, 15: d})
	}
	return netip.AddrFrom4([4]byte{a, b, c, d})
}

func TestArrange(t *testing.T) {
	shares := func(text string) []share {
		var list []model.Backend
		for _, word := range strings.Fields(text) {
			b := model.BackendAt(slot(word[:1]))
			b.Weight = uint16(len(word))
			list = append(list, b)
		}
		return spread(list)
	}
	for _, c := range []struct{ old, backends, want string }{
		{"", "a b c", "abc"},
		{"abc", "a c", "ac"},
		{"abc", "b c", "cb"},
		{"abc", "a b c d", "abcd"},
		{"abc", "b d e", "dbe"},
		{"", "aa b", "aab"},
		{"aab", "a b", "ab"},
		{"", "aa bb", "ab"},
		{"abcdef", "f", "f"},
		{"a-c", "a b c", "abc"},
	} {
		var old []netip.AddrPort
		for _, r := range c.old {
			old = append(old, slot(string(r)))
		}
		var got string
		for _, a := range arrange(old, shares(c.backends)) {
			got += string(rune(a.Port()))
		}
		if got != c.want {
			t.Errorf("arrange(%s, %s) = %s, want %s", c.old, c.backends, got, c.want)
		}
	}
}

// slot is a backend named by a letter; - is a missing one.
func slot(name string) netip.AddrPort {
	if name == "-" {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(netip.MustParseAddr("10.0.0.1"), uint16(name[0]))
}
