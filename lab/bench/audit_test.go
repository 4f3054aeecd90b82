package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/dataplane/external"
	"fairlead.dev/fairlead/dataplane/iptables"
	"fairlead.dev/fairlead/dataplane/ipvs"
	"fairlead.dev/fairlead/dataplane/localhost"
	"fairlead.dev/fairlead/dataplane/nftables"
	"fairlead.dev/fairlead/dataplane/userspace"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/service"
)

// audited is a plane, and external changes of it: commands, or files to remove below its pins.
type audited struct {
	name     string
	new      dataplane.New
	commands []string
	pins     []string
}

func auditedPlanes() []audited {
	wrapped := func(new dataplane.New) dataplane.New { return localhost.Wrap(conntrack.Wrap(new)) }
	return []audited{
		{name: "nftables", new: wrapped(nftables.New), commands: []string{
			"nft flush ruleset", "nft flush chain ip fairlead services", "nft delete table ip6 fairlead",
			"nft insert rule ip fairlead services drop",
		}},
		{name: "iptables, nft", new: wrapped(iptables.New(iptables.Options{Backend: iptables.NFTables})), commands: []string{
			"nft flush ruleset", "nft flush chain ip nat PREROUTING", "nft flush chain ip nat KUBE-SERVICES",
		}},
		{name: "iptables, legacy", new: wrapped(iptables.New(iptables.Options{Backend: iptables.Legacy})), commands: []string{
			"iptables-legacy -w -t nat -F PREROUTING", "iptables-legacy -w -t nat -F KUBE-SERVICES",
			"iptables-legacy -w -t filter -F",
		}},
		{name: "userspace", new: userspace.New(userspace.Options{}), commands: []string{
			"nft flush ruleset", "ip rule del table 17985", "ip route flush table 17985",
			"nft flush chain ip fairlead-userspace send-to-process-any",
		}},
		{name: "ebpf", pins: []string{"links/connect4", "links/sendmsg4", "memory/flows", "memory/affinities"}},
		{name: "ipvs", new: localhost.WrapBoth(conntrack.Wrap(ipvs.New(ipvs.Options{}))), commands: []string{
			"ipvsadm -C", "nft flush ruleset", "ip route flush table local proto 250",
		}},
	}
}

// BenchmarkAudit has an engine hold a fleet. It is the share of a core that this costs while nothing changes, and the
// time from the end of a command that breaks something until it is repaired.
//
//	FAIRLEAD_AUDIT_ACTS=100 ./dev bench Audit
func BenchmarkAudit(b *testing.B) {
	for _, p := range auditedPlanes() {
		for _, services := range []int{1000, 10_000} {
			b.Run(fmt.Sprintf("%s/%d", p.name, services), func(b *testing.B) {
				if p.name == "ipvs" && inTestKernel(b) {
					return
				}
				p.measure(b, fleet{services: services, endpoints: apart(10)})
			})
		}
	}
}

// fixed is a source that has all in its first batch.
type fixed chan service.Batch

func (o fixed) Next(ctx context.Context) (service.Batch, error) {
	select {
	case b := <-o:
		return b, nil
	case <-ctx.Done():
		return service.Batch{}, ctx.Err()
	}
}

func (fixed) Close() error { return nil }

// syncs are those in which something was programmed.
type syncs chan engine.Round

func (r syncs) Round(round engine.Round) {
	if round.Verb == engine.Synced && round.Err == nil {
		r <- round
	}
}

func (syncs) Answered(string, int)   {}
func (syncs) Arrived(engine.Changes) {}

const (
	idle      = time.Minute
	auditWait = 2 * time.Minute
)

// actsVariable is how many times something is broken.
const actsVariable = "FAIRLEAD_AUDIT_ACTS"

func (p audited) measure(b *testing.B, f fleet) {
	b.ReportMetric(0, "ns/op")
	bed := testbed.Need(b, testbed.Spec{Cgroup: true})
	path := testbed.NeedBPFFS(b)
	path = filepath.Join(path, "fairlead")
	if p.new == nil {
		p.new = ebpf.New(ebpf.Options{Packets: localhost.Wrap(conntrack.Wrap(nftables.New)), Cgroup: bed.Cgroup(), Pins: path})
	}
	var plane dataplane.Dataplane
	var watch *external.Watch
	err := bed.Do(testbed.Node, func() (err error) {
		watch, _ = external.Open() // without what it may not hear
		plane, err = p.new(dataplane.Config{})
		return err
	})
	if errors.Is(err, dataplane.ErrUnsupported) {
		lack.Skip(b, lack.IPVS, err)
	}
	if err != nil {
		b.Fatal(err)
	}
	defer plane.Close()
	defer watch.Close()
	batches, programmed := make(fixed, 1), make(syncs, 100)
	batches <- f.batch(bed)
	e := engine.New(engine.Options{
		Source: batches, Table: newTable(b), Plane: plane, ExternalChanges: watch.Changes(), Observer: programmed,
	})
	ctx, stop := context.WithCancel(b.Context())
	result := make(chan error, 1)
	go func() { result <- e.Run(ctx) }()
	defer func() {
		stop()
		if err := <-result; err != nil {
			b.Error(err)
		}
	}()
	programmed.next(b)
	p.cost(b)
	p.repairs(b, bed, path, programmed)
}

func (r syncs) next(b *testing.B) engine.Round {
	b.Helper()
	select {
	case round := <-r:
		return round
	case <-time.After(auditWait): //nolint:forbidigo // the limit is part of the experiment
		b.Fatal("nothing is programmed")
	}
	return engine.Round{}
}

// cost is what the process takes while nothing changes.
func (p audited) cost(b *testing.B) {
	letPass(15 * time.Second) // the engine finishes its start meanwhile
	before, start := cpuTime(b), time.Now()
	letPass(idle)
	b.ReportMetric(100*float64(cpuTime(b)-before)/float64(time.Since(start)), "%core")
}

func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// The engine gives repairs a quarter of the time, and two minutes in advance.
const (
	repairShare  = 4
	repairCredit = time.Minute
)

// repairs breaks something again and again, at whatever moment between two audits.
func (p audited) repairs(b *testing.B, bed *testbed.Bed, pins string, programmed syncs) {
	acts := 20
	if _, err := fmt.Sscan(os.Getenv(actsVariable), &acts); err != nil {
		acts = 20
	}
	var took []time.Duration
	var all time.Duration
	for begin := time.Now(); len(took) < acts; {
		letPass(time.Duration(rand.Int64N(int64(time.Second))))
		letPass(repairShare*all - repairCredit - time.Since(begin)) // endless changes are repaired ever more rarely
		for len(programmed) > 0 {
			<-programmed
		}
		act := p.vandalise(b, bed, pins)
		start, worked := time.Now(), cpuTime(b)
		programmed.next(b)
		took = append(took, time.Since(start))
		all += took[len(took)-1]
		b.Logf("%s: repaired after %d ms (%d ms of CPU)", act, took[len(took)-1].Milliseconds(), (cpuTime(b) - worked).Milliseconds())
	}
	if acts == 0 {
		return
	}
	slices.Sort(took)
	milliseconds := func(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
	b.ReportMetric(milliseconds(took[len(took)/2]), "ms-p50")
	b.ReportMetric(milliseconds(took[(len(took)*99)/100]), "ms-p99")
}

// vandalise does something that it may, and says what that was.
func (p audited) vandalise(b *testing.B, bed *testbed.Bed, pins string) string {
	b.Helper()
	if p.pins != nil {
		pin := p.pins[rand.IntN(len(p.pins))]
		if err := os.Remove(filepath.Join(pins, pin)); err != nil {
			b.Fatal(err)
		}
		return "rm " + pin
	}
	act := p.commands[rand.IntN(len(p.commands))]
	words := strings.Fields(act)
	out, err := bed.Command(b.Context(), testbed.Node, words[0], words[1:]...).CombinedOutput()
	if err != nil {
		b.Fatalf("%s: %v: %s", act, err, out)
	}
	return act
}
