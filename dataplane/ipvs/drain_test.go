package ipvs_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/ipvs"
	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/model"
)

// Package conformance tests how connections go on.
func TestDrain(t *testing.T) {
	t.Parallel()
	if _, err := ipvs.New(ipvs.Options{})(dataplane.Config{}); errors.Is(err, dataplane.ErrUnsupported) {
		vm.Replay(t, "IPVS")
		return
	}
	for name, test := range map[string]func(*namespace){
		"many rolling updates":     (*namespace).rollingUpdates,
		"a large Service goes":     (*namespace).largeGoes,
		"a refused real server":    (*namespace).refusedDestination,
		"somebody deletes as well": (*namespace).deletedByOthers,
		"or while it is drained":   (*namespace).deletedMeanwhile,
		"dh and another process":   (*namespace).hashedByAnother,
	} {
		t.Run(name, func(t *testing.T) { inNamespace(t, test) })
	}
}

const webFrontend = "frontend 10.96.0.10:80/tcp any forward default/web:http cluster snat never\n"

// rollingUpdates replaces all of 200 backends again and again. There are no connections, so nothing is left of those
// that are gone.
func (n *namespace) rollingUpdates() {
	const backends, updates = 200, 30
	rows := func(update int) string {
		text := webFrontend
		for i := range backends {
			text += fmt.Sprintf("backend default/web:http cluster 10.%d.1.%d:8080\n", 100+update, 1+i)
		}
		return text
	}
	p, state := n.sync(rows(0)), n.parse(rows(0))
	for update := range updates {
		next := n.parse(rows(1 + update))
		n.check(p.Apply(context.Background(), next, model.Diff(state, next)))
		state = next
		if have := strings.Count(n.servers(), "Masq 1\n"); have != backends || strings.Contains(n.servers(), "Masq 0") {
			n.Errorf("after update %d there are %d real servers with weight 1, want %d\n%s", update, have, backends, n.servers())
		}
	}
	report, err := p.Audit(context.Background(), state, dataplane.Quick)
	if err != nil || len(report.Drifts) > 0 {
		n.Error(report.Drifts, err)
	}
}

// largeGoes removes a Service with very many backends, and nothing else. BenchmarkLargeGoes tells how long that takes.
func (n *namespace) largeGoes() {
	const other = "frontend 10.96.0.11:80/tcp any forward default/other:http cluster snat never\n" +
		"backend default/other:http cluster 10.244.1.3:8080\n"
	state, next := n.parse(other+large(4000)), n.parse(other)
	p := n.open()
	n.check(p.Sync(context.Background(), state))
	n.check(p.Apply(context.Background(), next, model.Diff(state, next)))
	n.equal(blocks(n.servers()), "TCP 0A60000B:0050 rr\n-> 0AF40103:1F90 Masq 1\n")
	n.equal(strings.Join(n.audit(other), "\n"), "")
}

// large is a Service with so many backends.
func large(backends int) string {
	var rows strings.Builder
	rows.WriteString(webFrontend)
	for i := range backends {
		fmt.Fprintf(&rows, "backend default/web:http cluster 10.%d.%d.1:8080\n", 200+i>>8, i&255)
	}
	return rows.String()
}

// refusedReal has the kernel refuse one backend, which others do not suffer from.
func (n *namespace) refusedDestination() {
	const bad = "backend default/web:http cluster 224.0.0.9:8080\n"
	const good = webFrontend + "backend default/web:http cluster 10.244.1.2:8080\n" +
		"frontend 10.96.0.11:80/tcp any forward default/other:http cluster snat never\n" +
		"backend default/other:http cluster 10.244.1.3:8080\n"
	p := n.open()
	err := p.Sync(context.Background(), n.parse(good+bad))
	n.partial(err, "real server 224.0.0.9:8080 of 10.96.0.10:80/tcp")
	n.equal(blocks(n.servers()), "TCP 0A60000A:0050 rr\n-> 0AF40102:1F90 Masq 1\nTCP 0A60000B:0050 rr\n-> 0AF40103:1F90 Masq 1\n")

	less := strings.Replace(good+bad, "10.244.1.3", "10.244.1.4", 1)
	n.check(p.Apply(context.Background(), n.parse(less), model.Diff(n.parse(good+bad), n.parse(less))))
	n.equal(blocks(n.servers()), "TCP 0A60000A:0050 rr\n-> 0AF40102:1F90 Masq 1\nTCP 0A60000B:0050 rr\n-> 0AF40104:1F90 Masq 1\n")

	n.check(p.Apply(context.Background(), n.parse(good), model.Diff(n.parse(less), n.parse(good))))
	n.equal(strings.Join(n.audit(good), "\n"), "")
}

func (n *namespace) partial(err error, about string) {
	n.Helper()
	if !errors.Is(err, dataplane.ErrPartial) || !strings.Contains(err.Error(), about) || strings.Count(err.Error(), "refuses") != 1 {
		n.Errorf("%v is not about %s alone", err, about)
	}
}

// deletedByOthers deletes what is about to leave.
func (n *namespace) deletedByOthers() {
	const two = webFrontend + "backend default/web:http cluster 10.244.1.2:8080\nbackend default/web:http cluster 10.244.1.3:8080\n"
	one := strings.Replace(two, "backend default/web:http cluster 10.244.1.3:8080\n", "", 1)
	p := n.sync(two)
	n.run("ipvsadm", "-d", "-t", "10.96.0.10:80", "-r", "10.244.1.3:8080")
	err := p.Apply(context.Background(), n.parse(one), model.Diff(n.parse(two), n.parse(one)))
	n.partial(err, "real server 10.244.1.3:8080 of 10.96.0.10:80/tcp")
	n.check(p.Sync(context.Background(), n.parse(one)))
	n.equal(blocks(n.servers()), "TCP 0A60000A:0050 rr\n-> 0AF40102:1F90 Masq 1\n")
}

// deletedMeanwhile deletes what Audit has just found drained. That is reported, and the plane goes on.
func (n *namespace) deletedMeanwhile() {
	const rows = webFrontend + "backend default/web:http cluster 10.244.1.2:8080\n"
	var meanwhile func(operation string) error
	p, err := ipvs.New(n.options)(dataplane.Config{Fault: func(operation string) error { return meanwhile(operation) }})
	n.check(err)
	n.Cleanup(func() { _ = p.Close() })
	fails := errors.New("fails")
	meanwhile = func(operation string) error {
		if operation == "ipvs list" {
			return fails
		}
		return nil
	}
	n.sync(rows)
	if err := p.Sync(context.Background(), n.parse(rows)); !errors.Is(err, fails) {
		n.Errorf("Sync: %v, want the fault", err)
	}
	audit := func() error {
		report, err := p.Audit(context.Background(), n.parse(rows), dataplane.Quick)
		if len(report.Drifts) > 0 {
			n.Error(report.Drifts)
		}
		return err
	}
	n.run("ipvsadm", "-a", "-t", "10.96.0.10:80", "-r", "10.244.1.3:8080", "-m", "-w", "0")
	meanwhile = func(string) error { return nil }
	n.check(audit()) // it is as it should be, but for what drains
	meanwhile = func(operation string) error {
		if operation == "ipvs send" {
			n.run("ipvsadm", "-d", "-t", "10.96.0.10:80", "-r", "10.244.1.3:8080")
		}
		return nil
	}
	n.partial(audit(), "real server 10.244.1.3:8080 of 10.96.0.10:80/tcp")
	meanwhile = func(string) error { return nil }
	next := strings.Replace(rows, "10.244.1.2", "10.244.1.4", 1)
	n.check(p.Apply(context.Background(), n.parse(next), model.Diff(n.parse(rows), n.parse(next))))
	n.equal(blocks(n.servers()), "TCP 0A60000A:0050 rr\n-> 0AF40104:1F90 Masq 1\n")
}

// hashedByAnother has one process make the stand-in for dh, and another one find it as it should be.
func (n *namespace) hashedByAnother() {
	const draining = webFrontend + "frontend 10.96.0.11:80/tcp any forward default/web:http cluster snat never\n" +
		"pool default/web:http cluster scheduler dh\n" +
		"backend default/web:http cluster 10.244.1.2:8080\nbackend default/web:http cluster 10.244.1.3:8080 weight 3\n" +
		"backend default/web:http cluster 10.244.1.4:8080 weight 0\n"
	n.sync(draining)
	before := n.servers()
	if blocks := strings.Count(before, "fo\n"); blocks != 2 || strings.Count(before, "Masq 4\n") != 2 {
		n.Errorf("%d virtual servers have a stand-in:\n%s", blocks, before)
	}
	n.equal(strings.Join(n.audit(draining), "\n"), "")
	n.sync(draining)
	n.equal(n.servers(), before)
	serving := strings.Replace(draining, "weight 0", "weight 2", 1)
	n.sync(serving)
	if after := n.servers(); strings.Count(after, "dh\n") != 2 || strings.Contains(after, "Masq 4") {
		n.Errorf("all serve:\n%s", after)
	}
	n.equal(strings.Join(n.audit(serving), "\n"), "")
}
