package demo

import (
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/said"
)

func (d *demo) printf(format string, args ...any) { fmt.Fprintf(d.text, format, args...) }

// tell prints a line of the story.
func (d *demo) tell(when, format string, args ...any) {
	d.printf("  %-14s %s\n", when, fmt.Sprintf(format, args...))
}

func (d *demo) printProblems() {
	for _, p := range d.problems {
		d.printf("problem: %s\n", p.Error())
	}
	for _, p := range d.warnings {
		d.printf("%s: %s\n", p.Word(), p.Error())
	}
}

// printStart says first which data plane it is that does what follows.
func (d *demo) printStart(serving engine.About, took time.Duration) {
	if d.Mode != "" && serving.Plane != d.Mode {
		d.printf("This machine cannot serve mode %s, so data plane %s serves instead:\n", d.Mode, serving.Plane)
		for _, w := range d.proxy.warnings() {
			d.printf("  %s\n", w)
		}
	}
	d.printf("Data plane %s was ready after %s.\n", serving.Plane, took.Round(time.Millisecond))
	d.printf("A virtual cluster: two nodes and a client outside, in network namespaces of this process. %s, %s.\n",
		said.Count(len(d.result.Pods), "pod"), said.Count(len(d.result.Services), "Service"))
	d.printProblems()
	for _, n := range d.result.Notes {
		d.printf("%s.\n", n)
	}
	var kinds []string
	for _, kind := range slices.Sorted(maps.Keys(d.result.Skipped)) {
		kinds = append(kinds, fmt.Sprintf("%d %s", d.result.Skipped[kind], kind))
	}
	if kinds != nil {
		d.printf("Of no concern to a proxy: %s.\n", strings.Join(kinds, ", "))
	}
}

// answered is what is said about a trial that pods have answered.
const answered = "%-16s %-9s %-8s %s"

// table prints trials, with a line for each port of a Service above its own.
type table struct {
	out     io.Writer
	address int // width
	last    *trial
}

func newTable(out io.Writer, all []*trial) *table {
	t := &table{out: out, address: len("address")}
	for _, one := range all {
		t.address = max(t.address, len(one.address()))
	}
	return t
}

func (t *trial) address() string { return fmt.Sprintf("%s/%s", t.To, t.Protocol) }

func (t *trial) String() string {
	return fmt.Sprintf("%s %s %s from %s", t.Service, t.Kind, t.address(), t.from)
}

func (p *table) row(t *trial) {
	if p.last == nil {
		fmt.Fprintln(p.out)
		p.line("exposed as", "address", "from", fmt.Sprintf(answered, "connections", "share", "source", "vs direct"))
	}
	kind, address := string(t.Kind), t.address()
	if p.last == nil || p.last.Service != t.Service || p.last.Port != t.Port {
		fmt.Fprintf(p.out, "%s\n", t.title())
	} else if p.last.To == t.To {
		kind, address = "", ""
	}
	p.line(kind, address, string(t.from), t.outcome())
	p.last = t
}

func (p *table) line(kind, address, from, rest string) {
	fmt.Fprintf(p.out, "  %-13s %-*s  %-8s %s\n", kind, p.address, address, from, rest)
}

// shownPods is how many pods are named one by one.
const shownPods = 5

// title names the Service's port and the pods, in the order in which their connections are counted.
func (t *trial) title() string {
	title := t.Service
	if len(t.spec.Spec.Ports) > 1 {
		title += " " + t.Port
	}
	switch {
	case len(t.pods) == 0:
		return title + ": no pod"
	case len(t.pods) > shownPods:
		return fmt.Sprintf("%s: %d pods", title, len(t.pods))
	}
	return title + ": " + strings.ReplaceAll(strings.Join(t.pods, ", "), t.spec.Namespace+"/", "")
}

// outcome is what is to be said about a trial.
func (t *trial) outcome() string {
	switch {
	case t.fault != "":
		return "WRONG: " + t.fault
	case t.note != "":
		return t.note
	}
	return fmt.Sprintf(answered, t.connections(), t.share(), t.seen(), fmt.Sprintf("%.2f×", t.slower()))
}

// seen says whose address the pods take for the client's.
func (t *trial) seen() string {
	for _, b := range t.backends {
		if b.Masquerade && t.from != testbed.Node {
			return "node's"
		}
	}
	return "kept"
}

// connections are the counts of the pods in the title; of many pods, the least and the most.
func (t *trial) connections() string {
	var counts []int
	for _, pod := range t.pods {
		counts = append(counts, t.answers[pod])
	}
	if len(counts) > shownPods {
		return fmt.Sprintf("%d to %d each", slices.Min(counts), slices.Max(counts))
	}
	return strings.Trim(fmt.Sprint(counts), "[]")
}

// share is the least and the most that a pod got of what it could get.
func (t *trial) share() string {
	if t.sticky() {
		return "one pod"
	}
	least, most := len(t.through), 0
	for pod := range t.backends {
		least, most = min(least, t.answers[pod]), max(most, t.answers[pod])
	}
	percent := func(n int) int { return (100*n + len(t.through)/2) / len(t.through) }
	if percent(least) == percent(most) {
		return fmt.Sprintf("%d %%", percent(most))
	}
	return fmt.Sprintf("%d–%d %%", percent(least), percent(most))
}

func (d *demo) printSummary() {
	var slower []float64
	connections, tried := 0, 0
	for _, t := range d.trials {
		connections += len(t.through)
		if t.tried {
			tried++
		}
		if s := t.slower(); s > 0 {
			slower = append(slower, s)
		}
	}
	verdict := "all as it should be"
	if n := len(d.warnings); n > 0 {
		verdict = fmt.Sprintf("all as the manifests say, which may not be what is meant: see %s above", said.Count(n, "line"))
	}
	if len(d.faults) > 0 {
		verdict = fmt.Sprintf("%d NOT as they should be", len(d.faults))
	}
	d.printf("\n%s tried, %s: %s.\n", said.Count(tried, "way"), said.Count(connections, "connection"), verdict)
	if slices.Sort(slower); slower != nil {
		d.printf("Through a Service, a connection takes %.2f times as long as to the pod itself (median).\n",
			slower[len(slower)/2])
	}
}

func (d *demo) printFaults() {
	if len(d.faults) == 0 {
		return
	}
	d.printf("\nNot as it should be:\n")
	for _, f := range d.faults {
		d.printf("  %s\n", f)
	}
	if warnings := d.proxy.warnings(); len(warnings) > 0 {
		d.printf("Warnings of the proxy:\n  %s\n", strings.Join(warnings, "\n  "))
	}
}

// keep leaves everything running until ctx ends.
func (d *demo) keep(ctx context.Context) {
	pid := d.proxy.Pid()
	enter := fmt.Sprintf("nsenter -t %d -n", pid)
	if inUserns() {
		enter = fmt.Sprintf("nsenter -t %d -U --preserve-credentials -n", pid)
	}
	d.printf("\nThe cluster runs until Ctrl-C. To look at the node from another terminal:\n")
	d.printf("  %s nft list ruleset\n", enter)
	d.printf("  %s explain --control-socket %s node %s\n", d.Proxy[0], d.proxy.socket, d.example())
	d.printf("  less %s    (and what the proxy reads is in %s)\n", d.proxy.log, d.dir)
	<-ctx.Done()
}

// example is a destination that there is.
func (d *demo) example() string {
	if len(d.result.Addresses) == 0 {
		return "ADDRESS:PORT"
	}
	e := d.result.Addresses[0]
	if e.Protocol == model.TCP {
		return fmt.Sprintf("'%s'", e.To)
	}
	return fmt.Sprintf("'%s/%s'", e.To, e.Protocol)
}

// inUserns reports whether this process is root in a user namespace only.
func inUserns() bool {
	text, err := os.ReadFile("/proc/self/uid_map")
	return err == nil && !slices.Equal(strings.Fields(string(text)), []string{"0", "0", "4294967295"})
}
