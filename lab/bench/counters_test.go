package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/dataplane/iptables"
	"fairlead.dev/fairlead/dataplane/localhost"
	"fairlead.dev/fairlead/dataplane/nftables"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// usedServices is how many of the Services have connections; the others have ten endpoints each.
const usedServices = 1000

// details are the values of the setting counters, and of backendHealth one that observes. Accounting is the kernel's part
// of backends. The first one is the control, which comes twice.
var details = []detail{
	{name: "off"}, {name: "off again"}, {name: "services", counters: dataplane.PerPool},
	{name: "backends", counters: dataplane.PerBackend, accounts: true},
	{name: "accounting", accounts: true},
	{name: "observe", observes: true},
}

type detail struct {
	name     string
	counters dataplane.Detail
	accounts bool // connection tracking counts packets: what backends need in modes nftables and iptables
	observes bool // outcomes of connections are asked for, as the engine does
}

// BenchmarkCounters compares planes that count or observe with the same ones that do not. All serve in turn in one
// cluster.
func BenchmarkCounters(b *testing.B) {
	for name, plane := range map[string]dataplane.New{
		"nftables":        nftables.New,
		"iptables-nft":    iptables.New(iptables.Options{Backend: iptables.NFTables}),
		"iptables-legacy": iptables.New(iptables.Options{Backend: iptables.Legacy}),
		"ebpf":            nil,
	} {
		for _, size := range sizesOf(b, "10,10000") {
			b.Run(fmt.Sprint(name, "-", size), func(b *testing.B) {
				pins := testbed.NeedBPFFS(b)
				a := newBareArena(b)
				p := localhost.Wrap(conntrack.Wrap(plane))
				if plane == nil {
					p = ebpf.New(ebpf.Options{
						Packets: localhost.Wrap(conntrack.Wrap(nftables.New)), Cgroup: a.bed.Cgroup(), Pins: filepath.Join(pins, "fairlead"),
					})
				}
				compareDetails(b, a, p, size)
			})
		}
	}
}

func compareDetails(b *testing.B, a *arena, plane dataplane.New, size int) {
	b.Helper()
	used := min(size, usedServices)
	others := apart(10)
	f := fleet{services: size, endpoints: func(i int) []netip.Addr {
		if i < used {
			return a.pods()[:1]
		}
		return others(i)
	}}
	state := f.state(b, newTable(b), a.bed)
	c := a.client(client{place: "client", protocol: model.TCP}, used)
	figures := map[string]map[string]Series{}
	next := rounds(b, roundsOf(b, 30))
	order := slices.Clone(details)
	for next() {
		rand.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		for _, d := range order {
			took, err := c.measureDetail(b, plane, d, state)
			if err != nil {
				b.Fatal(err)
			}
			for figure, t := range took {
				if figures[figure] == nil {
					figures[figure] = map[string]Series{}
				}
				figures[figure][d.name] = append(figures[figure][d.name], t.Seconds())
			}
		}
	}
	reportDetails(b, figures)
}

// measureDetail has a plane serve for a moment.
func (c *client) measureDetail(
	b *testing.B, plane dataplane.New, d detail, s *model.State,
) (took map[string]time.Duration, err error) {
	b.Helper()
	runtime.GC()
	accounting := "0"
	if d.accounts {
		accounting = "1"
	}
	var p dataplane.Dataplane
	err = c.bed.Do(testbed.Node, func() (err error) {
		p, err = plane(dataplane.Config{Counters: d.counters})
		return errors.Join(err, os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_acct", []byte(accounting), 0))
	})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, p.Remove(b.Context()), p.Close()) }()
	took = map[string]time.Duration{}
	timed := func(figure string, f func() error) {
		start := time.Now()
		err = errors.Join(err, f())
		took[figure] = time.Since(start)
	}
	timed("first Sync", func() error { return p.Sync(b.Context(), s) })
	end := func() {}
	if d.observes {
		end = observe(b, p)
	}
	defer func() { end() }()
	for range 3 {
		all, e := c.slice()
		err = errors.Join(err, e)
		slices.Sort(all)
		if len(all) > 0 && (took["connect"] == 0 || all[len(all)/2] < took["connect"]) {
			took["connect"] = all[len(all)/2]
		}
	}
	open, e := c.openAll()
	if e != nil {
		return took, errors.Join(err, e)
	}
	defer open.close()
	for range 3 {
		all, _, e := open.slice(traffics()[0])
		err = errors.Join(err, e)
		slices.Sort(all)
		if len(all) > 0 && (took["request"] == 0 || all[len(all)/2] < took["request"]) {
			took["request"] = all[len(all)/2]
		}
	}
	end()
	timed("Counters", func() error { _, _ = p.Counters(b.Context()); return nil })
	timed("full audit", func() error { _, err := p.Audit(b.Context(), s, dataplane.Full); return err })
	return took, err
}

// observe has a plane tell what becomes of connections, as the engine does, until end is called, once or more.
func observe(b *testing.B, p dataplane.Dataplane) (end func()) {
	b.Helper()
	const interval = 200 * time.Millisecond
	ctx, cancel := context.WithCancel(b.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for next := time.NewTicker(interval); ; {
			if err := p.Outcomes(ctx, false, func(model.Outcome) {}); err != nil && ctx.Err() == nil {
				b.Error(err)
			}
			select {
			case <-ctx.Done():
				next.Stop()
				return
			case <-next.C:
			}
		}
	}()
	return sync.OnceFunc(func() {
		cancel()
		<-ended
	})
}

func reportDetails(b *testing.B, figures map[string]map[string]Series) {
	b.Helper()
	head := []string{b.Name()}
	for _, d := range details {
		head = append(head, d.name)
	}
	rows := [][]string{head}
	for _, figure := range []string{"connect", "request", "first Sync", "Counters", "full audit"} {
		control := figures[figure]["off"]
		row := []string{figure, show(control.Duration())}
		for _, d := range details[1:] {
			ratio := figures[figure][d.name].Ratio(control)
			row = append(row, ratio.precise())
			b.ReportMetric(ratio.Median, compact(figure+":"+d.name))
		}
		rows = append(rows, row)
	}
	printTable(fmt.Sprintf("%d rounds: medians, ratios to off", len(figures["connect"]["off"])), rows...)
}
