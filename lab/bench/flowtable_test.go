package bench

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/localhost"
	"fairlead.dev/fairlead/dataplane/nftables"
	"fairlead.dev/fairlead/lab/testbed"
)

const (
	directTracked = "direct, tracked"
	withRequest   = "connections with a request"
	shortSlice    = 200 // connections in a slice
)

// flowContenders are compared with direct, where no packet meets any rule, and directTracked.
func flowContenders() []contender {
	packets := localhost.Wrap(conntrack.Wrap(nftables.New))
	return []contender{
		{name: direct},
		{name: directAgain},
		{name: directTracked},
		{name: "nftables", plane: packets},
		{name: "nftables, flowtable", plane: func(c dataplane.Config) (dataplane.Dataplane, error) {
			c.Flowtable = dataplane.FlowtableAlways
			return packets(c)
		}},
	}
}

// BenchmarkFlowtable compares the costs of a pod's connections to a pod of another node, which its node forwards. The
// kernel of the other node tracks nothing. Of each slice the tenth percentile counts: other processes disturb it less than
// the median.
func BenchmarkFlowtable(b *testing.B) {
	if !testbed.HasFlowtables() {
		runInTestKernel(b, "this kernel has no flowtables")
		return
	}
	var arenas []*arena
	for range openArenas {
		a := newWideArena(b)
		a.tcp = slices.Clone(a.tcp[len(a.tcp)-1:]) // of the other node
		arenas = append(arenas, a)
	}
	reportFlowtable(b, inTurn(b, flowContenders(), arenas, 30, contender.measureFlows))
}

// measureFlows has a contender serve for a moment, and adds what the pod sees to the figures.
func (c contender) measureFlows(b *testing.B, a *arena, figures map[string]Series) {
	b.Helper()
	to := netip.AddrPortFrom(serviceAddr(0), servicePort)
	rows := fmt.Sprintf("pods %s\n", testbed.ClusterCIDRs()[0]) + forward("web", to, remote(a.bed), "offcluster")
	end := c.serve(b, a.bed, rows)
	defer end()
	if c.plane == nil {
		to = remote(a.bed)
	}
	if c.name == directTracked {
		command(b, a.bed, testbed.Node, "nft", "add table ip tracked; "+
			"add chain ip tracked a { type nat hook prerouting priority -100; }; "+
			"add chain ip tracked b { type nat hook postrouting priority 100; }")
		defer command(b, a.bed, testbed.Node, "nft", "delete table ip tracked")
	}
	client := a.to(clientPod, to)
	took := map[string][]time.Duration{}
	err := client.flows(took)
	if err == nil {
		err = a.track.ConntrackTableFlush(0)
	}
	if err != nil {
		b.Error(err)
		b.FailNow()
	}
	for kind, took := range took {
		slices.Sort(took)
		name := nameOpen(clientPod, kind, c.name)
		figures[name] = append(figures[name], took[len(took)/10].Seconds())
	}
}

// flows notes what each thing took.
func (c *client) flows(took map[string][]time.Duration) error {
	open, err := c.openAll()
	if err != nil {
		return err
	}
	defer open.close()
	for _, t := range traffics() {
		if took[t.name], _, err = open.slice(t); err != nil {
			return err
		}
	}
	took[withRequest], err = c.short()
	return err
}

// short makes connections with one request, and returns what each took from connect to close.
func (c *client) short() (took []time.Duration, err error) {
	buffer := make([]byte, requestBytes)
	err = c.bed.Do(c.place, func() error {
		if err := blockSignals(); err != nil {
			return err
		}
		for range shortSlice {
			begin := time.Now()
			here, there, err := c.open()
			if err != nil {
				return err
			}
			o := &openConnections{ends: [][2]int{{here, there}}}
			err = request(here, there, buffer)
			o.close()
			if err != nil {
				return err
			}
			took = append(took, time.Since(begin))
		}
		return nil
	})
	return took, err
}

func reportFlowtable(b *testing.B, figures map[string]Series) {
	b.Helper()
	head := []string{"pod to a pod of another node"}
	for _, c := range flowContenders() {
		head = append(head, c.name)
	}
	rows := [][]string{head}
	var kinds []string
	for _, t := range traffics() {
		kinds = append(kinds, t.name)
	}
	for _, kind := range append(kinds, withRequest) {
		control := figures[nameOpen(clientPod, kind, direct)]
		row := []string{kind, show(control.Duration())}
		for _, c := range flowContenders()[1:] {
			ratio := control.Ratio(figures[nameOpen(clientPod, kind, c.name)]) // of rates: the inverse of that of times
			row = append(row, ratio.precise())
			b.ReportMetric(ratio.Median, compact(kind+":"+c.name))
		}
		rows = append(rows, row)
	}
	n := len(figures[nameOpen(clientPod, withRequest, direct)])
	printTable(fmt.Sprintf("all contenders in turn in one cluster, %d rounds in %d clusters: medians of the tenth percentiles; "+
		"times, and rates as ratios to direct", n, openArenas), rows...)
}
