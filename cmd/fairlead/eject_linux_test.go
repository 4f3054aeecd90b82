package main

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
)

// TestRun_ejects has a backend fall silent. In mode nftables and iptables clients stop to meet it long before its
// EndpointSlice says anything, and meet it again when it answers.
func TestRun_ejects(t *testing.T) {
	for _, mode := range []string{"nftables", "iptables"} {
		t.Run(mode, func(t *testing.T) { testEjects(t, mode) })
	}
}

// ejection is long enough for a busy machine to look at what is beside an ejected backend.
const ejection = 8 * time.Second

func testEjects(t *testing.T, mode string) {
	w := newWorld(t)
	w.start("--proxy-mode", mode, "--backend-health", "eject", "--ejection-time", ejection.String(),
		"--ejection-max-time", ejection.String(), "--ejection-slow-start", "1s")
	w.reaches("pod-a")
	w.reaches("pod-b")
	ctx, stop := context.WithCancel(t.Context())
	asked := make(chan struct{})
	go func() { // ten clients a second
		defer close(asked)
		for tick := time.NewTicker(100 * time.Millisecond); ctx.Err() == nil; {
			select {
			case <-tick.C:
				go func() {
					_, _ = w.bed.Probe(ctx, testbed.Probe{From: testbed.Outside, To: nodePort, Timeout: 5 * time.Second})
				}()
			case <-ctx.Done():
			}
		}
	}()
	t.Cleanup(func() { stop(); <-asked })
	a := w.bed.Addr("pod-a", false).String() + ":8080"
	w.plug("pod-a", false)
	ejected := func() bool {
		_, out := w.ask("services", "web", "-o", "json")
		return strings.Contains(out, `"rule": "ejected"`)
	}
	eventually.True(t, "the backend is ejected", ejected)
	for range 20 {
		if got := w.probe(testbed.Outside, nodePort); got != "pod-b" {
			t.Errorf("a connection beside the ejected backend: %s", got)
		}
	}
	w.says(0, []string{a + ": is ejected: has not answered since", "it is tried again at"}, "explain", "192.0.2.9", "192.0.2.1:30080")
	w.plug("pod-a", true)
	eventually.Taking(ejection).True(t, "it is in use again", func() bool { return !ejected() })
	w.reaches("pod-a")
}

// plug has a pod answer, or not: packets reach it, and it has no way back.
func (w *world) plug(pod testbed.Place, in bool) {
	w.Helper()
	change := netlink.RouteAdd
	if in {
		change = netlink.RouteDel
	}
	err := w.bed.Do(pod, func() (err error) {
		for _, half := range []string{"0.0.0.0/1", "128.0.0.0/1"} {
			_, prefix, _ := net.ParseCIDR(half)
			err = errors.Join(err, change(&netlink.Route{Dst: prefix, Type: unix.RTN_BLACKHOLE}))
		}
		return err
	})
	if err != nil {
		w.Fatal(err)
	}
}
