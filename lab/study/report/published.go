package report

import (
	"cmp"
	"fmt"
	"slices"

	"fairlead.dev/fairlead/lab/study"
)

// Published is a published figure, of other machines and versions: to be seen beside those of here, never to be
// compared with them in digits.
type Published struct {
	Experiment string
	Figure     string // of the experiment; empty: the main one
	Plane      string // of kube-proxy, unless Who says whose
	Who        string
	Size       int // Services
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

	add(Published{Experiment: "footprint", Unit: study.Bytes, Source: memory2015, Plane: "iptables",
		Says: "heap in use, three endpoints each"}, []int{1, 500, 1000}, 5_210_368, 12_017_176, 22_719_136)
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
	share := func(who string, value float64) Published {
		return Published{Experiment: "bandwidth", Who: who, Value: value, Unit: study.Share,
			Says: "of the throughput from pod to pod", Source: eparis}
	}
	return []Published{
		update("nftables", 10_000, 141e-3, "one Service more", partial),
		update("nftables", 44_128, 1.33, "a change, with netlink listings", slow139513),
		update("iptables", 3595, 2.8, "a partial sync, 138,792 endpoints", real2026),
		share("kube-proxy userspace", 0.36), share("kube-proxy iptables", 0.96),
		{Experiment: "footprint", Figure: "peak", Plane: "nftables", Size: 10_000, Value: 260 << 20, Unit: study.Bytes,
			Says: "peak, two endpoints each; 650 MiB before", Source: partial},
		start("iptables", 10_000, 40, "restart", restart), start("nftables", 10_000, 194, "restart", restart),
		start("nftables", 5006, 13*60+15, "full sync, 250,011 endpoints", slow135639),
		start("nftables", 44_128, 16*60+43, "full sync", slow139513),
	}
}

// whose is the program and its mode.
func (p Published) whose() string { return cmp.Or(p.Who, "kube-proxy "+p.Plane) }

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
