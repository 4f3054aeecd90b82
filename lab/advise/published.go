package advise

import (
	"fmt"
	"math"
	"slices"
	"time"
)

// estimate is what docs/performance.md says of a plane, or what was measured for it: ratios of a connection and of a
// request on an open one, and the time of one change.
type estimate struct {
	plane               string
	services            int
	connection, request float64
	change              time.Duration
}

// estimates are of different runs and machines: good enough to rank planes where nothing can be measured. The planes
// come in the order of preference, which counts where there is little between them. nftables needs least of a kernel,
// and is what kube-proxy is moving to; userspace takes its connections along when it ends.
func estimates() []estimate {
	return []estimate{
		{nftables, 1000, 1.29, 1.12, 11 * time.Microsecond},
		{nftables, 10_000, 1.31, 1.12, 12 * time.Microsecond},
		{ebpf, 10, 1.10, 1.02, 18 * time.Microsecond},
		{ebpf, 10_000, 1.15, 1.02, 11 * time.Microsecond},
		{ebpf, 100_000, 1.24, 1.02, 8 * time.Microsecond},
		{ipvs, 1000, 1.50, 1.07, 2 * time.Millisecond},
		{ipvs, 20_000, 1.53, 1.06, 2 * time.Millisecond},
		{iptables, 1000, 1.37, 1.12, 4 * time.Millisecond},
		{iptables, 10_000, 1.37, 1.12, 41 * time.Millisecond},
		{userspace, 1000, 6, 3.4, 2 * time.Microsecond},
	}
}

// The planes of which something is known here.
const (
	nftables  = "nftables"
	iptables  = "iptables"
	ipvs      = "ipvs"
	ebpf      = "ebpf"
	userspace = "userspace"
)

// preference is the place of a plane in the order of estimates.
func preference(plane string) int {
	all := estimates()
	i := slices.IndexFunc(all, func(e estimate) bool { return e.plane == plane })
	if i < 0 {
		return len(all)
	}
	return i
}

// estimated is the estimate for a number of Services: that of the size that is nearest in proportion.
func estimated(plane string, services int) (best estimate, ok bool) {
	distance := func(e estimate) float64 {
		return math.Abs(math.Log(float64(e.services)) - math.Log(float64(max(services, 1))))
	}
	for _, e := range estimates() {
		if e.plane == plane && (!ok || distance(e) < distance(best)) {
			best, ok = e, true
		}
	}
	best.change = grown(plane, best.change, float64(services)/float64(max(best.services, 1)))
	return best, ok
}

// grown is what a change takes with so many times as many Services: iptables has the kernel work through all rules for
// each, other planes do not.
func grown(plane string, change time.Duration, times float64) time.Duration {
	if plane != iptables {
		return change
	}
	return time.Duration(float64(change) * times)
}

// A Comparison is a published one of other programs, by which people choose a mode.
type Comparison struct {
	From, To int    // Services for which it was made, or says something; To 0: and more
	Says     string // of kube-proxy's modes and their rivals
	Source   string
}

// Published are comparisons that are often quoted. They are about kube-proxy's rules, of which mode iptables has a
// list that each new connection walks through. Fairlead's iptables are a tree, and so what they say of sizes holds
// for kube-proxy only; what they say of mechanisms holds here, too.
func Published() []Comparison {
	return []Comparison{
		{0, 2000, "16 % more time for a connection with kube-proxy's iptables at 1,000 Services",
			"devfloor9.github.io (EKS 1.31)"},
		{0, 20_000, "kube-proxy's iptables ahead of Cilium's eBPF, 2.2 times the short connections, up to some 20,000 " +
			"Services", "imroc.cc/tke (network benchmark)"},
		{20_000, 0, "kube-proxy's iptables behind Cilium's eBPF, 70 to 88 % of the short connections at 30,000 Services",
			"imroc.cc/tke (network benchmark)"},
		{3000, 0, "the first packet takes four times as long with kube-proxy's iptables as with its nftables at 5,000 " +
			"Services, and 20 times at 30,000", "KEP-3866"},
		{0, 0, "kube-proxy's nftables as fast as its IPVS or slightly faster, at every size",
			"kubernetes.io/blog, 2025-02-28"},
		{5000, 0, "one more Service takes kube-proxy's iptables 20 s among 20,000, and its IPVS 1.5 ms",
			"flftuu.com, 2019-11-01"},
	}
}

// about reports whether it says something of so many Services.
func (c Comparison) about(services int) bool {
	return services >= c.From && (c.To == 0 || services <= c.To)
}

func (c Comparison) String() string { return fmt.Sprintf("%s [%s]", c.Says, c.Source) }
