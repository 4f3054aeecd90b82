package bench

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/iptables"
	"fairlead.dev/fairlead/dataplane/localhost"
	"fairlead.dev/fairlead/dataplane/nftables"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// usedServices is how many of the Services have connections; the others have ten endpoints each.
const usedServices = 1000

// details are the values of the setting counters. The first one is the control, which comes twice.
var details = []struct {
	name string
	dataplane.Detail
}{
	{"off", dataplane.NoDetail}, {"off again", dataplane.NoDetail},
	{"services", dataplane.PerPool}, {"backends", dataplane.PerBackend},
}

// BenchmarkCounters compares planes that count with the same ones that do not. All serve in turn in one cluster.
func BenchmarkCounters(b *testing.B) {
	for name, plane := range map[string]dataplane.New{
		"nftables":        nftables.New,
		"iptables-nft":    iptables.New(iptables.Options{Backend: iptables.NFTables}),
		"iptables-legacy": iptables.New(iptables.Options{Backend: iptables.Legacy}),
	} {
		for _, size := range sizesOf(b, "10,10000") {
			b.Run(fmt.Sprint(name, "-", size), func(b *testing.B) {
				compareDetails(b, localhost.Wrap(conntrack.Wrap(plane)), size)
			})
		}
	}
}

func compareDetails(b *testing.B, plane dataplane.New, size int) {
	b.Helper()
	a := newArena(b, 0)
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
			took, err := c.measureDetail(b, plane, dataplane.Config{Counters: d.Detail}, state)
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
	b *testing.B, plane dataplane.New, config dataplane.Config, s *model.State,
) (took map[string]time.Duration, err error) {
	b.Helper()
	runtime.GC()
	accounting := "0"
	if config.Counters == dataplane.PerBackend {
		accounting = "1"
	}
	var p dataplane.Dataplane
	err = c.bed.Do(testbed.Node, func() (err error) {
		p, err = plane(config)
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
	timed("Counters", func() error { _, _ = p.Counters(b.Context()); return nil })
	timed("full audit", func() error { _, err := p.Audit(b.Context(), s, dataplane.Full); return err })
	return took, err
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
