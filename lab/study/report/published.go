package report

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"fairlead.dev/fairlead/lab/study"
)

// Published is a published figure, of other machines and versions: to be seen beside those of here, never to be
// compared with them in digits.
type Published struct {
	Experiment string
	Figure     string // of the experiment; empty: the main one
	Plane      string // of kube-proxy; empty: not told
	Size       int    // Services
	Value      float64
	Unit       study.Unit
	Says       string // what it is, if not quite the figure
	Source     string
}

// The sources, with the machines as far as they say.
const (
	kep3866    = "KEP-3866, chart iptables-vs-nftables; kubernetes.io/blog, 2025-02-28"
	uk8s       = "UCloud, UK8S: kube-proxy modes (github.com/UCloudDoc-Team/uk8s)"
	flftuu     = "flftuu.com, 2019-11-01"
	huawei     = "Xie, Scale Kubernetes to Support 50,000 Services (KubeCon 2017)"
	proposal   = "kubernetes/community#692 (2017)"
	eparis     = "kubernetes#16344 (2015), one host"
	memory2015 = "kubernetes#14118 (2015)"
	partial    = "kubernetes#126013 (1.32)"
	real2026   = "kubernetes#138073 (2026)"
	restart    = "kubernetes#130119"
	slow135639 = "kubernetes#135639 (1.34)"
	slow139513 = "kubernetes#139513 (1.36.1)"
	eks        = "devfloor9.github.io, engineering-playbook (EKS 1.31)"
	huawei2018 = "Wang, Huawei Cloud, Kubernetes Services at scale (zhuanlan.zhihu.com/p/37230013)"
	dns2015    = "kubernetes#11977 (2015, Kubernetes 1.0)"
	busy2020   = "kubernetes#88212 (2020)"
	rollout    = "kubernetes#114052 (2022), load balancer of GCE"
	flushed    = "kubernetes#76376 (2019, before Kubernetes 1.14)"
	repeated   = "the comparison that this experiment repeats"
)

// PublishedFigures are all that are known to this program.
func PublishedFigures() []Published {
	return slices.Concat(publishedTables(), publishedSingles())
}

// publishedTables are those that studies have published by size: of each plane a value for each size.
func publishedTables() (all []Published) {
	add := func(p Published, sizes []int, values ...float64) {
		for i, v := range values {
			p.Size, p.Value = sizes[i], v
			all = append(all, p)
		}
	}
	const ms, us = 1e-3, 1e-6
	total := Published{Experiment: "connect", Unit: study.Seconds, Source: uk8s,
		Says: "total.median with ab, 1,000 at a time, 20 endpoints each, read off charts"}
	sizes := []int{100, 500, 1000, 2000, 3000, 4000}
	total.Plane = "iptables"
	add(total, sizes, 75*ms, 78*ms, 96*ms, 120*ms, 143*ms, 184*ms)
	total.Plane = "ipvs"
	add(total, sizes, 95*ms, 93*ms, 94*ms, 93*ms, 96*ms, 95*ms)

	first := Published{Experiment: "lookup", Unit: study.Seconds, Source: kep3866,
		Says: "round trip of the first packet, median, read off a chart"}
	sizes = []int{5000, 10_000, 30_000}
	first.Plane = "iptables"
	add(first, sizes, 50*us, 60*us, 270*us)
	first.Plane = "nftables"
	add(first, sizes, 13*us, 13*us, 14*us)

	rule := Published{Experiment: "update", Unit: study.Seconds, Source: flftuu,
		Says: "one rule more, 4 to 80,000 in all, nodes of 2 CPUs and 4 GB"}
	sizes = []int{1, 100, 500, 1000, 1500, 2000, 5000, 10_000, 15_000, 20_000}
	rule.Plane = "iptables"
	add(rule, sizes, 77*ms, 100*ms, 491*ms, 1.302, 2.476, 2.662, 6.547, 9.491, 15.125, 20)
	rule.Plane = "ipvs"
	add(rule, sizes, 0.8*ms, 0.85*ms, 0.85*ms, 0.85*ms, 0.9*ms, 0.9*ms, 0.9*ms, 0.97*ms, 1*ms, 1.52*ms)
	add(Published{Experiment: "update", Unit: study.Seconds, Source: proposal, Plane: "iptables",
		Says: "rules added one by one, 8 to 160,000 in all"}, []int{1, 5000, 20_000}, 2*ms, 11*60, 5*3600)
	add(Published{Experiment: "update", Unit: study.Seconds, Source: huawei2018, Plane: "ipvs",
		Says: "one rule more, 8 to 160,000 in all"}, []int{1, 5000, 20_000}, 30*us, 50*us, 70*us)

	const megabytes = 8e6 // a second
	iperf := Published{Experiment: "bandwidth", Unit: study.BitRate, Source: huawei2018}
	sizes = []int{1, 1000, 5000, 10_000, 25_000, 50_000}
	of := func(plane, place string, values ...float64) {
		iperf.Plane, iperf.Says = plane, place+" Service, iperf, four ports each, read off a chart"
		for i := range values {
			values[i] *= megabytes
		}
		add(iperf, sizes, values...)
	}
	of("iptables", "first", 66, 64, 50, 15.5, 0, 0)
	of("iptables", "last", 66, 56, 39, 6, 0, 0)
	of("ipvs", "first", 66, 61, 53.5, 43.5, 30, 24)
	of("ipvs", "last", 66, 56, 53.5, 43.5, 28, 24)

	memory := Published{Experiment: "footprint", Unit: study.Bytes, Source: memory2015, Plane: "iptables",
		Says: "heap in use, three endpoints each"}
	add(memory, []int{1, 500, 1000}, 5_210_368, 12_017_176, 22_719_136)
	memory.Source, memory.Says = huawei2018, "memory usage; out of memory at 15,000"
	add(memory, []int{1000, 5000, 10_000}, 1.1*(1<<30), 1.9*(1<<30), 2.3*(1<<30))
	memory.Plane, memory.Says = "ipvs", "memory usage"
	add(memory, []int{1000, 10_000, 50_000}, 386<<20, 542<<20, 1272<<20)
	return all
}

// publishedSingles have one size, or none.
func publishedSingles() []Published {
	update := func(plane string, size int, value float64, says, source string) Published {
		return Published{Experiment: "update", Plane: plane, Size: size, Value: value, Unit: study.Seconds, Says: says,
			Source: source}
	}
	start := func(plane string, size int, value float64, says, source string) Published {
		return Published{Experiment: "footprint", Figure: "start", Plane: plane, Size: size, Value: value,
			Unit: study.Seconds, Says: says, Source: source}
	}
	share := func(plane string, value float64) Published {
		return Published{Experiment: "bandwidth", Plane: plane, Value: value, Unit: study.Share,
			Says: "of the throughput from pod to pod", Source: eparis}
	}
	return []Published{
		{Experiment: "lookup", Plane: "iptables", Value: 8e-3, Unit: study.Seconds, Source: huawei2018,
			Says: "the longest time to reach a Service, with a number of rules that is not told"},
		update("nftables", 10_000, 141e-3, "one Service more", partial),
		update("nftables", 44_128, 1.33, "a change, with netlink listings", slow139513),
		update("iptables", 3595, 2.8, "a partial sync, 138,792 endpoints", real2026),
		share("userspace", 0.36), share("iptables", 0.96),
		{Experiment: "jitter", Plane: "userspace", Value: 2.469, Unit: study.Seconds, Source: dns2015,
			Says: "the longest DNS query, each time that all rules of 151 Services are written; 2 ms otherwise"},
		{Experiment: "jitter", Figure: "proxy", Plane: "iptables", Size: 5000, Value: 0.85, Unit: study.Share,
			Says: "or 50 to 85 %, under a load that is not told; 50 to 100 % at 10,000", Source: huawei2018},
		{Experiment: "jitter", Figure: "proxy", Plane: "ipvs", Size: 2000, Value: 0.65, Unit: study.Share,
			Says: "and more, almost all the time", Source: busy2020},
		{Experiment: "rolling", Value: 28, Unit: study.Count,
			Says: "lost of 388 requests while a DaemonSet was updated, mode not told", Source: rollout},
		{Experiment: "switch", Figure: "longest", Plane: "iptables", Value: 3, Unit: study.Seconds,
			Says: "without Services in a restart, for which it removed its rules", Source: flushed},
		{Experiment: "footprint", Figure: "peak", Plane: "nftables", Size: 10_000, Value: 260 << 20, Unit: study.Bytes,
			Says: "peak, two endpoints each; 650 MiB before", Source: partial},
		start("iptables", 10_000, 40, "restart", restart), start("nftables", 10_000, 194, "restart", restart),
		start("nftables", 5006, 13*60+15, "full sync, 250,011 endpoints", slow135639),
		start("nftables", 44_128, 16*60+43, "full sync", slow139513),
	}
}

// whose is the program and its mode, if that was told.
func (p Published) whose() string { return strings.TrimSpace("kube-proxy " + p.Plane) }

// contender is who it is a figure of.
func (p Published) contender() study.Contender {
	return study.Contender{Name: p.whose(), Kind: study.Peer, Plane: p.Plane}
}

// origin says who published it, and what it is.
func (p Published) origin() string { return "[" + p.Source + ": " + p.Says + "]" }

// String is a sentence.
func (p Published) String() string {
	text := p.whose()
	if p.Size > 0 {
		text += " at " + counted(p.Size, "Services")
	}
	return fmt.Sprintf("%s: %s (%s) [%s]", text, quantity(p.Unit, p.Value), p.Says, p.Source)
}

// about reports whether it is a figure of an experiment.
func (p Published) about(d study.Description, f study.Figure) bool {
	main, _ := mainFigure(d)
	return p.Experiment == d.Name && cmp.Or(p.Figure, main.Name) == f.Name
}
