package report

import (
	"fmt"

	"fairlead.dev/fairlead/lab/study"
)

// Published is a published figure, of other machines and versions: to be seen beside those of here, never to be
// compared with them in digits.
type Published struct {
	Experiment string
	Figure     string // words that the name of a figure has; empty: the main one
	Plane      string // of kube-proxy, unless Who says whose
	Who        string
	Size       int // Services
	Value      float64
	Unit       study.Unit
	Says       string // what it is, if not quite the figure
	Source     string
}

// The sources.
const (
	kep3866    = "KEP-3866, chart iptables-vs-nftables; kubernetes.io/blog, 2025-02-28"
	uk8s       = "UCloud, UK8S: kube-proxy modes (github.com/UCloudDoc-Team/uk8s)"
	flftuu     = "flftuu.com, 2019-11-01"
	huawei     = "Xie, Scale Kubernetes to Support 50,000 Services (KubeCon 2017)"
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
	lookup := func(plane string, size int, value float64) Published {
		return Published{Experiment: "lookup", Plane: plane, Size: size, Value: value, Unit: study.Seconds,
			Says: "round trip of the first packet, median, read off a chart", Source: kep3866}
	}
	update := func(plane string, size int, value float64, says, source string) Published {
		return Published{Experiment: "update", Plane: plane, Size: size, Value: value, Unit: study.Seconds, Says: says,
			Source: source}
	}
	total := func(what string, value float64) Published {
		return Published{Experiment: "connect", Figure: "total." + what, Who: "kube-proxy (mode and size not said)",
			Value: value, Unit: study.Seconds, Says: "total." + what + " of 10,000 connections with ab, 1,000 at a time",
			Source: uk8s}
	}
	const added, rule = "one Service more", "one rule more"
	return []Published{
		lookup("iptables", 5000, 50e-6), lookup("iptables", 10_000, 60e-6), lookup("iptables", 30_000, 270e-6),
		lookup("nftables", 5000, 13e-6), lookup("nftables", 10_000, 13e-6), lookup("nftables", 30_000, 14e-6),
		total("min", 51e-3), total("mean", 79e-3), total("median", 78e-3), total("max", 101e-3),
		update("iptables", 1, 77e-3, rule, flftuu), update("iptables", 20_000, 20, rule, flftuu),
		update("ipvs", 1, 0.8e-3, rule, flftuu), update("ipvs", 20_000, 1.5e-3, rule, flftuu),
		update("iptables", 5000, 11*60, rule+", 40,000 in all", huawei),
		update("iptables", 20_000, 5*3600, rule+", 160,000 in all", huawei),
		update("nftables", 10_000, 141e-3, added, partial),
		update("nftables", 44_128, 1.33, "a change, with netlink listings", slow139513),
		update("iptables", 3595, 2.8, "a partial sync, 138,792 endpoints", real2026),
		{Experiment: "footprint", Figure: "start", Plane: "iptables", Size: 10_000, Value: 40, Unit: study.Seconds,
			Says: "restart", Source: restart},
		{Experiment: "footprint", Figure: "start", Plane: "nftables", Size: 10_000, Value: 194, Unit: study.Seconds,
			Says: "restart", Source: restart},
		{Experiment: "footprint", Figure: "start", Plane: "nftables", Size: 5006, Value: 13*60 + 15, Unit: study.Seconds,
			Says: "full sync, 250,011 endpoints", Source: slow135639},
		{Experiment: "footprint", Figure: "start", Plane: "nftables", Size: 44_128, Value: 16*60 + 43, Unit: study.Seconds,
			Says: "full sync", Source: slow139513},
	}
}

// String is a sentence.
func (p Published) String() string {
	who := p.Who
	if who == "" {
		who = "kube-proxy " + p.Plane
	}
	text := who
	if p.Size > 0 {
		text += " at " + counted(p.Size, "Services")
	}
	return fmt.Sprintf("%s: %s (%s) [%s]", text, quantity(p.Unit, p.Value), p.Says, p.Source)
}

// publishedFor are those of a block.
func (s *Statistics) publishedFor(b block) (all []Published) {
	d, _ := s.Experiment(b.experiment)
	main, _ := mainFigure(d)
	for _, p := range PublishedFigures() {
		about := p.Figure == "" && main.Name == b.figure.Name || has(b.figure.Name, p.Figure)
		if about && p.Experiment == b.experiment && p.Unit == b.figure.Unit {
			all = append(all, p)
		}
	}
	return all
}
