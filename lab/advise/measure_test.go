package advise

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/eventually"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	ebpfplane "fairlead.dev/fairlead/dataplane/ebpf"
	iptablesplane "fairlead.dev/fairlead/dataplane/iptables"
	ipvsplane "fairlead.dev/fairlead/dataplane/ipvs"
	nftablesplane "fairlead.dev/fairlead/dataplane/nftables"
	userspaceplane "fairlead.dev/fairlead/dataplane/userspace"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

func TestMain(m *testing.M) { os.Exit(testbed.RunTests(m.Run)) }

// places notes where planes were opened, to look afterwards what is left.
type places struct {
	mu         sync.Mutex
	namespaces map[string]bool // as /proc names them
	cgroups    []string
}

// plane notes where it is opened.
func (p *places) plane(name string, new func(Place) dataplane.New) Plane {
	return Plane{name, func(at Place) (dataplane.Dataplane, error) {
		namespace, err := os.Readlink("/proc/thread-self/ns/net")
		if err != nil {
			return nil, err
		}
		p.mu.Lock()
		p.namespaces[namespace] = true
		if at.Cgroup != "" {
			p.cgroups = append(p.cgroups, at.Cgroup)
		}
		p.mu.Unlock()
		return new(at)(dataplane.Config{})
	}}
}

// all are the planes that there are, as far as this package's tests need them.
func (p *places) all() []Plane {
	always := func(new dataplane.New) func(Place) dataplane.New {
		return func(Place) dataplane.New { return conntrack.Wrap(new) }
	}
	const few = 16384
	sizes := ebpfplane.Sizes{Affinities: few, Flows: few, Sockets: few, Translations: few}
	return []Plane{
		p.plane(nftables, always(nftablesplane.New)),
		p.plane(iptables, always(iptablesplane.New(iptablesplane.Options{Backend: iptablesplane.NFTables}))),
		p.plane(ipvs, always(ipvsplane.New(ipvsplane.Options{}))),
		p.plane(ebpf, func(at Place) dataplane.New {
			return ebpfplane.New(ebpfplane.Options{Cgroup: at.Cgroup, Pins: filepath.Join(at.BPF, ebpfplane.PinsDir), Sizes: sizes})
		}),
		p.plane(userspace, func(Place) dataplane.New { return userspaceplane.New(userspaceplane.Options{}) }),
	}
}

// noTrace fails the test unless all is gone, at once or a little later: the kernel frees namespaces in the background.
func (p *places) noTrace(t *testing.T) {
	t.Helper()
	eventually.Nil(t, "all is gone", func() error {
		if left := p.left(); len(left) > 0 {
			return fmt.Errorf("left: %s", left)
		}
		return nil
	})
}

// left are namespaces in which a thread of this process is, or of which it has a file, and cgroups.
func (p *places) left() (left []string) {
	links, _ := filepath.Glob("/proc/self/task/*/ns/net")
	files, _ := filepath.Glob("/proc/self/fd/*")
	for _, link := range append(links, files...) {
		if to, err := os.Readlink(link); err == nil && p.namespaces[to] {
			left = append(left, link+" is "+to)
		}
	}
	for _, dir := range p.cgroups {
		if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
			left = append(left, dir)
		}
	}
	return left
}

func newPlaces() *places { return &places{namespaces: map[string]bool{}} }

// many are rows of n Services.
func many(n int) *model.State {
	var text strings.Builder
	fmt.Fprintln(&text, "pods 172.30.0.0/16")
	for i := range n {
		addr := netip.AddrFrom4([4]byte{10, 43, byte(i >> 8), byte(i)})
		to := netip.AddrFrom4([4]byte{172, 30, byte(i >> 8), byte(i)})
		fmt.Fprintf(&text, "frontend %s:80/tcp any forward default/web-%05d: cluster snat offcluster\n", addr, i)
		fmt.Fprintf(&text, "pool default/web-%05[1]d: cluster\nbackend default/web-%05[1]d: cluster %[2]s:8080\n", i, to)
	}
	return parse(text.String())
}

func parse(text string) *model.State {
	s, err := model.ParseState(text)
	if err != nil {
		panic(err)
	}
	return s
}

// Every plane that can run here has figures, the others say why not, and nothing is left.
func TestMeasure(t *testing.T) {
	t.Parallel()
	rows := many(300)
	before := rows.String()
	p := newPlaces()
	asked := ""
	m := Measure(t.Context(), Options{
		Planes: p.all(), State: rows, Duration: time.Minute,
		Progress: func(plane string, n, of int) { asked += fmt.Sprintf("%s %d/%d ", plane, n, of) },
	})
	m.Wait()
	if want := "nftables 1/5 ebpf 2/5 ipvs 3/5 iptables 4/5 userspace 5/5 "; asked != want {
		t.Errorf("measured were %s, want %s", asked, want)
	}
	for i, name := range []string{nftables, ebpf, ipvs, iptables, userspace} {
		f := m.Findings[i]
		switch g := f.Figures; {
		case f.Plane != name:
			t.Errorf("%d is %s, want %s", i, f.Plane, name)
		case f.Missing != "":
			t.Logf("%s: %s", name, f.Missing)
		case g == nil:
			t.Errorf("%s was not measured: %s", name, f.Unmeasured)
		case g.Services < leastServices || g.Fill <= 0 || g.Change <= 0 || g.Connection.Median <= 0 || g.Request.Median <= 0 ||
			g.Rounds < minRounds:
			t.Errorf("%s: %+v", name, g)
		}
	}
	if m.Findings[0].Figures == nil {
		t.Error("nftables can run everywhere where there are these tests")
	}
	if rows.String() != before {
		t.Error("the rows have changed")
	}
	p.noTrace(t)
}

// A node without Services has figures, too, and one of which nothing is of use as it is.
func TestMeasure_rows(t *testing.T) {
	t.Parallel()
	for name, rows := range map[string]string{
		"none": "",
		"IPv6": `frontend [fd43::10]:80/tcp any forward default/web: cluster6 snat offcluster
pool default/web: cluster6
backend default/web: cluster6 [fd30::1]:8080`,
		"one that is not for everybody": `frontend 10.43.0.10:80/tcp any forward default/web: cluster snat never allow 198.51.100.0/24
pool default/web: cluster
backend default/web: cluster 172.30.0.1:8080`,
		"others for pods": `frontend 203.0.113.5:80/tcp any forward default/web: cluster snat never
frontend 203.0.113.5:80/tcp internal drop default/web:
pool default/web: cluster
backend default/web: cluster 172.30.0.1:8080`,
		"UDP, and the scratch cluster's own": `frontend 10.43.0.10:53/udp any forward default/dns: cluster snat never
frontend 10.244.1.2:80/tcp any reject default/web:
guard 10.43.0.0/16 drop
guard 10.244.0.0/16 drop
pool default/dns: cluster
backend default/dns: cluster 172.30.0.1:53`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPlaces()
			m := Measure(t.Context(), Options{Planes: p.all()[:1], State: parse(rows), Duration: time.Minute})
			m.Wait()
			if f := m.Findings[0]; f.Figures == nil {
				t.Errorf("%+v", f)
			}
			p.noTrace(t)
		})
	}
}

// Of many Services some are measured, so that time and memory are bounded. The planes that this machine lacks leave
// their time to the last one, which has enough of it on a slow machine, too.
func TestMeasure_some(t *testing.T) {
	t.Parallel()
	p := newPlaces()
	lacking := p.plane(nftables, func(Place) dataplane.New {
		return func(dataplane.Config) (dataplane.Dataplane, error) { return nil, dataplane.ErrUnsupported }
	})
	planes := append(slices.Repeat([]Plane{lacking}, 11), p.all()[0])
	m := Measure(t.Context(), Options{Planes: planes, State: many(60_000), Duration: time.Minute})
	m.Wait()
	f := m.Findings[11]
	if f.Figures == nil {
		t.Fatalf("%+v", f)
	}
	if most := servicesPerSecond * 60 / 12; f.Figures.Services > most || f.Figures.Services < leastServices {
		t.Errorf("measured with %d Services, want %d to %d", f.Figures.Services, leastServices, most)
	}
}

// broken is a plane whose Sync does something else, too.
type broken struct {
	dataplane.Dataplane
	sync func() error
}

func (b broken) Sync(ctx context.Context, s *model.State) error {
	return errors.Join(b.Dataplane.Sync(ctx, s), b.sync())
}

func (b broken) Repair(ctx context.Context, s *model.State, _ dataplane.Report) error {
	return b.Sync(ctx, s)
}

func (p *places) broken(sync func() error) Plane {
	return p.plane("broken", func(Place) dataplane.New {
		return func(c dataplane.Config) (dataplane.Dataplane, error) {
			plane, err := nftablesplane.New(c)
			return broken{plane, sync}, err
		}
	})
}

// An error of one plane is reported with it, and the next one is measured.
func TestMeasure_broken(t *testing.T) {
	t.Parallel()
	p := newPlaces()
	fails := func(err error) Plane { return p.broken(func() error { return err }) }
	nowhere := p.plane("nowhere", func(Place) dataplane.New {
		return func(dataplane.Config) (dataplane.Dataplane, error) {
			return nil, fmt.Errorf("nowhere: %w: it has no such thing", dataplane.ErrUnsupported)
		}
	})
	m := Measure(t.Context(), Options{
		Planes: []Plane{
			fails(errors.New("out of order")), fails(fmt.Errorf("SCTP: %w", dataplane.ErrPartial)), nowhere, p.all()[0],
		},
		State: many(3), Duration: time.Minute,
	})
	m.Wait()
	if f := m.Findings[0]; f.Plane != nftables || f.Figures == nil {
		t.Errorf("%+v", f)
	}
	if f := m.Findings[1]; f.Figures != nil || f.Unmeasured != "out of order" {
		t.Errorf("%+v", f)
	}
	if f := m.Findings[2]; f.Figures == nil || !strings.Contains(f.Unserved, "SCTP") {
		t.Errorf("%+v", f)
	}
	if f := m.Findings[3]; f.Missing != "it has no such thing" {
		t.Errorf("%+v", f)
	}
	p.noTrace(t)
}

// Measure does not wait for a plane that takes too long; it is cleaned up all the same.
func TestMeasure_slow(t *testing.T) {
	t.Parallel()
	p := newPlaces()
	release := make(chan struct{})
	slow := p.broken(func() error { <-release; return nil })
	m := Measure(t.Context(), Options{Planes: []Plane{slow, slow}, State: many(3), Duration: 2 * time.Second})
	for _, f := range m.Findings {
		if f.Figures != nil || f.Unmeasured != "there was no time" {
			t.Errorf("%+v", f)
		}
	}
	close(release)
	m.Wait()
	p.noTrace(t)
}

// After an interrupt nothing is left.
func TestMeasure_interrupted(t *testing.T) {
	t.Parallel()
	p := newPlaces()
	ctx, cancel := context.WithCancel(t.Context())
	interrupts := p.broken(func() error { cancel(); return nil })
	m := Measure(ctx, Options{Planes: []Plane{interrupts, interrupts}, State: many(3), Duration: time.Minute})
	m.Wait()
	for _, f := range m.Findings {
		if f.Figures != nil || f.Unmeasured == "" {
			t.Errorf("%+v", f)
		}
	}
	p.noTrace(t)
}
