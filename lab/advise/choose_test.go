package advise

import (
	"strings"
	"testing"
	"time"
)

// measured is a Finding with figures; other fields may be set.
func measured(plane string, connection, request float64, change time.Duration) Finding {
	return Finding{Plane: plane, Figures: &Figures{
		Services: 100, Change: change, Connection: Ratio{Median: connection}, Request: Ratio{Median: request},
	}}
}

func missing(plane string) Finding {
	return Finding{Plane: plane, Missing: "the kernel has no " + plane}
}

func unknown(plane string) Finding { return Finding{Plane: plane, Unmeasured: "no namespaces"} }

func unserved(f Finding) Finding {
	f.Unserved = "SCTP"
	return f
}

// choice is what is to be chosen in a Case.
type choice struct {
	name  string
	c     Case
	order string
	why   string // of which this is a part
}

func choices() []choice {
	const quick, slow = 10 * time.Microsecond, 20 * time.Millisecond
	hundred := Rows{Services: 100}
	return []choice{
		{"the fastest", Case{Rows: hundred, Findings: []Finding{
			measured(nftables, 1.4, 1.2, quick), measured(iptables, 1.3, 1.0, quick), measured(ipvs, 1.5, 1.1, quick),
		}}, "iptables ipvs nftables", "Use iptables for 100 Services. Measured here with 100 Services"},
		{"between which there is little", Case{Rows: hundred, Findings: []Finding{
			measured(iptables, 1.19, 1.1, quick), measured(nftables, 1.2, 1.1, quick),
		}}, "nftables iptables", "iptables, which is hardly faster"},
		{"what is done otherwise counts a tenth", Case{Rows: hundred, Findings: []Finding{
			measured(nftables, 1.2, 1.1, quick), measured(ebpf, 1.12, 1.08, quick),
		}}, "nftables ebpf", "ebpf, with 10 % added because sidecars see no Service address"},
		{"but no more", Case{Rows: hundred, Findings: []Finding{
			measured(nftables, 1.4, 1.2, quick), measured(ebpf, 1.05, 1.02, quick),
		}}, "ebpf nftables", "For ebpf 10 % is added because sidecars see no Service address"},
		{"session affinity", Case{Rows: Rows{Services: 100, Affine: 1}, Findings: []Finding{
			measured(nftables, 1.2, 1.1, quick), measured(ebpf, 1.02, 1.01, quick),
		}}, "nftables ebpf", "and as much because session affinity"},
		{"a scheduler that it has", Case{Rows: Rows{Services: 100, Scheduled: map[string]int{"twos": 1}}, Findings: []Finding{
			measured(nftables, 1.1, 1.1, quick), measured(ebpf, 1.0, 1.0, quick),
		}}, "ebpf nftables", "It would be nftables without schedulers."},
		{"schedulers", Case{Rows: Rows{Services: 100, Scheduled: map[string]int{"wlc": 1}}, Findings: []Finding{
			measured(nftables, 1.2, 1.1, quick), measured(ipvs, 1.25, 1.12, quick),
		}}, "ipvs nftables", "It would be nftables without schedulers."},
		{"changes", Case{Rows: hundred, Findings: []Finding{
			measured(iptables, 1.2, 1.1, slow), measured(nftables, 1.4, 1.2, quick),
		}}, "nftables iptables", "a change of an endpoint 10µs. Next comes iptables: 1.20 times, 1.10 times, 20ms."},
		{"changes that grow with the Services", Case{Rows: Rows{Services: 10_000}, Findings: []Finding{
			measured(iptables, 1.2, 1.1, time.Millisecond), measured(nftables, 1.4, 1.2, quick),
		}}, "nftables iptables", "1.10 times, 100ms"},
		{"short connections", Case{Rows: hundred, Traffic: Short, Findings: []Finding{
			measured(iptables, 1.2, 1.5, quick), measured(nftables, 1.4, 1.1, quick),
		}}, "iptables nftables", "It would be nftables if most connections stayed open."},
		{"long connections", Case{Rows: hundred, Traffic: Long, Findings: []Finding{
			measured(iptables, 1.2, 1.5, quick), measured(nftables, 1.4, 1.1, quick),
		}}, "nftables iptables", "It would be iptables if most connections were short."},
		{"not possible", Case{Rows: hundred, Findings: []Finding{
			missing(nftables), measured(iptables, 1.9, 1.9, quick), missing(ipvs),
		}}, "iptables", "no other data plane can run here. Not possible here: nftables (the kernel has no nftables), ipvs ("},
		{"all rows go before speed", Case{Rows: hundred, Findings: []Finding{
			unserved(measured(ebpf, 1, 1, quick)), measured(nftables, 1.9, 1.9, slow),
		}}, "nftables ebpf", "ebpf, which does not serve all rows (SCTP)"},
		{"some rows are better than none", Case{Rows: hundred, Findings: []Finding{unserved(measured(ebpf, 1, 1, quick))}},
			"ebpf", "It does not serve all rows: SCTP."},
		{"userspace is the last", Case{Rows: hundred, Findings: []Finding{
			measured(userspace, 1, 1, quick), measured(nftables, 1.9, 1.9, slow), unknown(ebpf),
		}}, "nftables ebpf userspace", ""},
		{"unless others do not serve all rows", Case{Rows: hundred, Findings: []Finding{
			measured(userspace, 6, 3, quick), unserved(measured(nftables, 1.9, 1.9, slow)),
		}}, "userspace nftables", ""},
		{"what was measured goes first", Case{Rows: hundred, Findings: []Finding{
			unknown(ebpf), measured(iptables, 1.5, 1.5, slow),
		}}, "iptables ebpf", "ebpf, which could not be measured (no namespaces)"},
		{"nothing was measured", Case{Rows: hundred, Findings: []Finding{
			unknown(nftables), unknown(iptables), missing(ipvs), unknown(ebpf), unknown(userspace),
		}}, "nftables ebpf iptables userspace", "by published figures, as nothing was measured here (no namespaces)"},
		{"nothing was measured, of many Services", Case{Rows: Rows{Services: 50_000}, Findings: []Finding{
			unknown(iptables), unknown(ipvs),
		}}, "ipvs iptables", "a change of an endpoint 2ms"},
		{"nothing was measured, of few Services", Case{Rows: Rows{Services: 100}, Findings: []Finding{
			unknown(iptables), unknown(ipvs),
		}}, "iptables ipvs", ""},
		{"nothing", Case{Findings: []Finding{missing(nftables), missing(ebpf)}}, "",
			"No data plane can run here: nftables (the kernel has no nftables), ebpf (the kernel has no ebpf)."},
	}
}

func TestChoose(t *testing.T) {
	for _, c := range choices() {
		got := Choose(c.c)
		if order := strings.Join(strings.Fields(got.Plane+" "+strings.Join(got.Next, " ")), " "); order != c.order {
			t.Errorf("%s: %s, want %s: %s", c.name, order, c.order, got.Why)
		}
		if !strings.Contains(got.Why, c.why) || strings.Contains(got.Why, "..") {
			t.Errorf("%s: want %q in:\n%s", c.name, c.why, got.Why)
		}
	}
}
