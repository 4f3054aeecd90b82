package report

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"fairlead.dev/fairlead/lab/study"
)

// made is a Result of everything that a run may have: kernels, planes, peers, several cases, turns that failed, cells
// without a direct control. Its figures come from formulas, with a little noise that is always the same.
func made() *study.Result {
	m := maker{random: rand.New(rand.NewPCG(8, 8)), Result: study.Result{
		Format: study.Format, Version: "v0.0.0", Depth: study.Standard, Complete: true, Services: "generated",
		Started: time.Date(2026, 11, 22, 14, 3, 0, 0, time.UTC), Ended: time.Date(2026, 11, 22, 14, 17, 0, 0, time.UTC),
		Kernels: []study.Kernel{
			{Name: study.This, Release: "6.18.44", CPU: "AMD EPYC", CPUs: 2, Memory: 4 << 30,
				Programs: map[string]string{"kube-proxy": "v1.37.1"}},
			{Name: study.Test, Release: "6.12.1", Note: "User-Mode Linux: eBPF is interpreted", CPU: "AMD EPYC", CPUs: 1,
				Memory: 1 << 30},
		},
		Contenders: []study.Contender{
			{Name: "direct", Kind: study.Direct}, {Name: "direct again", Kind: study.Again},
			{Name: "nftables", Kind: study.Fairlead, Plane: "nftables"}, {Name: "ebpf", Kind: study.Fairlead, Plane: "ebpf"},
			{Name: "iptables", Kind: study.Fairlead, Plane: "iptables"}, {Name: "ipvs", Kind: study.Fairlead, Plane: "ipvs"},
			{Name: "kube-proxy iptables", Kind: study.Peer, Plane: "iptables"},
			{Name: "kube-proxy nftables", Kind: study.Peer, Plane: "nftables"},
			{Name: "kube-proxy ipvs", Kind: study.Peer, Plane: "ipvs"},
		},
	}}
	m.connect()
	m.rules()
	m.lookup()
	m.update()
	m.bandwidth()
	m.footprint()
	m.http()
	m.schedulers()
	m.rolling()
	return &m.Result
}

type maker struct {
	study.Result
	random *rand.Rand
	at     int
}

// here and there are the contenders on each kernel.
func here() []string {
	return []string{"direct", "direct again", "nftables", "ebpf", "iptables", "kube-proxy iptables", "kube-proxy nftables"}
}

func there() []string {
	return []string{"direct", "direct again", "ipvs", "iptables", "kube-proxy iptables", "kube-proxy ipvs"}
}

// noisy is a value as a round has it.
func (m *maker) noisy(v float64) float64 {
	return v * math.Exp(0.02*m.random.NormFloat64())
}

// add has a row of some rounds.
func (m *maker) add(row study.Row, rounds int, figures study.Figures) {
	for round := 1; round <= 4*rounds; round++ {
		row.Round, row.Took, row.Figures = round, 1, study.Figures{}
		m.at++
		row.At = m.Started.Add(time.Duration(m.at) * time.Second)
		for _, name := range slices.Sorted(maps.Keys(figures)) {
			row.Figures[name] = m.noisy(figures[name])
		}
		m.Rows = append(m.Rows, row)
	}
}

// slowdown is how many times as long as without a proxy a connection takes.
func slowdown(who string, services int) float64 {
	n := float64(services)
	switch who {
	case "nftables", "kube-proxy nftables":
		return 1.25
	case "ebpf":
		return 1.1
	case "iptables":
		return 1.32
	case "ipvs", "kube-proxy ipvs":
		return 1.5
	case "kube-proxy iptables":
		return 1.3 + n/5000
	}
	return 1
}

func (m *maker) describe(name, does, axis string, figures ...study.Figure) {
	m.Experiments = append(m.Experiments, study.Description{
		Name: name, Does: does, Source: "a study of " + name, Axis: axis, Figures: figures,
	})
}

func (m *maker) connect() {
	m.describe("connect", "10,000 short HTTP connections, 1,000 at a time", "Services",
		study.Figure{Name: "total.median", Unit: study.Seconds, Better: study.Lower, Main: true,
			Does: "connection, request and answer, median"},
		study.Figure{Name: "connect p50", Unit: study.Seconds, Better: study.Lower, Does: "connection, median"})
	for _, k := range []string{study.This, study.Test} {
		who := here()
		if k == study.Test {
			who = there()
		}
		for _, n := range []int{100, 1000, 2000, 4000} {
			for _, c := range who {
				s := slowdown(c, n)
				m.add(study.Row{Experiment: "connect", Kernel: k, Size: n, Contender: c}, 7,
					study.Figures{"total.median": 60e-6 * s, "connect p50": 20e-6 * s})
			}
		}
	}
	m.Rows = append(m.Rows, study.Row{Experiment: "connect", Kernel: study.This, Size: 4000,
		Contender: "kube-proxy nftables",
		Round:     29, Failed: "the peer ended: exit status 1", At: m.Started})
}

func (m *maker) rules() {
	m.describe("rules", "requests through a NodePort while rules grow", "rules",
		study.Figure{Name: "requests", Unit: study.PerSecond, Better: study.Higher, Main: true,
			Does: "requests answered per second"})
	for _, of := range []string{"10 at a time", "100 at a time, 500 ms of delay", "1,000 at a time, 500 ms of delay"} {
		for _, n := range []int{10_014, 200_000} {
			for _, c := range here() {
				m.add(study.Row{Experiment: "rules", Kernel: study.This, Case: of, Size: n, Contender: c}, 6,
					study.Figures{"requests": 2000})
			}
		}
	}
}

func (m *maker) lookup() {
	m.describe("lookup", "time of a connection to the first and to the last Service", "Services",
		study.Figure{Name: "connect p50", Unit: study.Seconds, Better: study.Lower, Main: true,
			Does: "connection, median"})
	for _, of := range []string{"first Service", "last Service"} {
		for _, n := range []int{100, 1000, 10_000} {
			for _, c := range here() {
				s := slowdown(c, n)
				if of == "first Service" {
					s = slowdown(c, 0)
				}
				m.add(study.Row{Experiment: "lookup", Kernel: study.This, Case: of, Size: n, Contender: c}, 6,
					study.Figures{"connect p50": 17e-6 * s})
			}
		}
	}
}

func (m *maker) update() {
	m.describe("update", "one Service more, until traffic follows", "Services",
		study.Figure{Name: "seen p50", Unit: study.Seconds, Better: study.Lower, Main: true,
			Does: "until a connection is answered, median"})
	for _, n := range []int{1, 100, 1000, 10_000} {
		for _, c := range here()[2:] {
			took := 2e-3
			if c == "kube-proxy iptables" || c == "kube-proxy nftables" {
				took = 30e-3 + 0.7e-3*float64(n)
			}
			m.add(study.Row{Experiment: "update", Kernel: study.This, Size: n, Contender: c}, 5, study.Figures{"seen p50": took})
		}
	}
}

func (m *maker) bandwidth() {
	m.describe("bandwidth", "bulk throughput through the first and the last Service", "Services",
		study.Figure{Name: "throughput", Unit: study.BitRate, Better: study.Higher, Main: true,
			Does: "of one connection"})
	for _, of := range []string{"first Service", "last Service"} {
		for _, c := range here() {
			m.add(study.Row{Experiment: "bandwidth", Kernel: study.This, Case: of, Size: 1000, Contender: c}, 5,
				study.Figures{"throughput": 9.4e9})
		}
	}
}

func (m *maker) footprint() {
	m.describe("footprint", "CPU and memory", "Services",
		study.Figure{Name: "memory", Unit: study.Bytes, Better: study.Lower, Main: true,
			Does: "resident"},
		study.Figure{Name: "start", Unit: study.Seconds, Better: study.Lower, Does: "until the last Service answers"})
	for _, n := range []int{100, 10_000} {
		for _, c := range here()[2:] {
			m.add(study.Row{Experiment: "footprint", Kernel: study.This, Size: n, Contender: c}, 1,
				study.Figures{"memory": 30e6 + 3000*float64(n)*slowdown(c, n), "start": 0.2 + 1e-4*float64(n)*slowdown(c, n)})
		}
	}
}

func (m *maker) http() {
	m.describe("http", "one virtual user, 100 web servers", "",
		study.Figure{Name: "duration p95", Unit: study.Seconds, Better: study.Lower, Main: true,
			Does: "of a request, 95th percentile"},
		study.Figure{Name: "requests", Unit: study.PerSecond, Better: study.Higher, Does: "requests per second"})
	for _, c := range here() {
		m.add(study.Row{Experiment: "http", Kernel: study.This, Contender: c}, 6,
			study.Figures{"duration p95": 90e-6 * math.Sqrt(slowdown(c, 100)), "requests": 11e3 / slowdown(c, 100)})
	}
}

func (m *maker) schedulers() {
	m.describe("schedulers", "500 virtual users, 10 servers of a second", "",
		study.Figure{Name: "duration p90", Unit: study.Seconds, Better: study.Lower, Main: true,
			Does: "of a request, 90th percentile"})
	for i, name := range []string{"rr", "lc", "dh", "sh", "sed", "nq"} {
		for _, c := range []string{"direct", "ipvs"} {
			of := c
			if c == "ipvs" {
				of = "ipvs " + name
			} else if i > 0 {
				continue
			}
			m.add(study.Row{Experiment: "schedulers", Kernel: study.Test, Contender: of}, 6,
				study.Figures{"duration p90": 1.05 + 0.3*float64(i%3)})
		}
	}
}

func (m *maker) rolling() {
	m.describe("rolling", "connections lost during a rolling update", "",
		study.Figure{Name: "lost", Unit: study.Count, Better: study.Lower, Main: true,
			Does: "connections lost"})
	for i, c := range here() {
		m.add(study.Row{Experiment: "rolling", Kernel: study.This, Case: "short connections", Contender: c}, 3,
			study.Figures{"lost": 0})
		m.Rows[len(m.Rows)-1].Figures["lost"] = float64(max(0, i-4))
	}
	m.Rows = append(m.Rows, study.Row{Experiment: "rolling", Kernel: study.This, Case: "short connections",
		Contender: "ebpf", Round: 13, Failed: fmt.Sprintf("%d servers did not start", 2), At: m.Started})
}
