package takeover_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/ipvs"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/takeover"
)

// needIPVS plays a test in the test kernel if this one has no IPVS, and reports whether it did.
func needIPVS(t *testing.T) (played bool) {
	if _, err := os.Stat("/proc/net/ip_vs"); err == nil {
		return false
	}
	vm.Replay(t, "IPVS")
	return true
}

// leisurely is the time between two attempts of each kind in the test kernel, which is slow.
const leisurely = 200 * time.Millisecond

// Short time-outs of IPVS, so that the test need not wait for unused servers. (198.18.0.9 is another program's, which
// kube-proxy respects only if it is told.)
var ipvsFlags = []string{"--ipvs-udp-timeout=15s", "--ipvs-tcpfin-timeout=3s", "--ipvs-exclude-cidrs=198.18.0.9/32"}

// ipvsWorld has kube-proxy's rules in mode ipvs, and connections through it.
func ipvsWorld(t *testing.T, backend string) (w *world, before map[string]string, l *load) {
	w = newWorld(t, backend)
	w.run("", "ipvsadm", "-A", "-t", "198.18.0.9:8888", "-s", "rr")
	w.run("", "ipvsadm", "-a", "-t", "198.18.0.9:8888", "-r", "10.244.1.9:80", "-m", "-w", "5")
	w.addForeign()
	before = w.snapshot()
	before["ipvs"] = w.run("", "ipvsadm", "-S", "-n")
	p := w.startKubeProxy("ipvs", ipvsFlags...)
	l = w.startLoad(leisurely)
	l.await(20)
	p.stop()
	return w, before, l
}

func (w *world) expectNoIPVS(before map[string]string) {
	w.Helper()
	if got := w.run("", "ipvsadm", "-S", "-n"); got != before["ipvs"] {
		w.Errorf("virtual servers: was\n%s\nis now\n%s", before["ipvs"], got)
	}
	w.expect(before)
}

func TestIPVS(t *testing.T) {
	t.Parallel()
	if needIPVS(t) {
		return
	}
	w, before, l := ipvsWorld(t, "legacy")
	to := w.takeover(time.Hour)
	t.Logf("kube-proxy has left\n%s", w.find(to))
	f := w.startFairlead()
	l.await(20)
	// Its source is the Service's own address, as long as that is on kube-ipvs0.
	l.streams = append(l.streams, w.open(try{testbed.Node, web.clusterIP(false), model.TCP}),
		w.open(try{testbed.Node, web.clusterIP(true), model.TCP}))
	w.remove(to)
	l.await(40)
	left := w.find(to)
	want := regexp.MustCompile(`(?m)^1 kube-ipvs0 \(link\)(: for its connections, until .*Z\n)` +
		`\d+ virtual servers \(ipvs\)(.*\n)3 sets \(ipset ip\)(.*\n)3 sets \(ipset ip6\)(.*\n)$`)
	if !want.MatchString(left) {
		t.Errorf("while IPVS drains there is\n%s", left)
	}
	to = w.takeover(2 * time.Hour) // another process
	w.remove(to)
	w.expectLeft(to, left)
	l.await(40)
	l.endShort()

	var servers atomic.Int64
	servers.Store(1 << 30)
	drained := make(chan error, 1)
	go func() {
		drained <- to.Drain(t.Context(), func(p takeover.Progress) {
			t.Log(p)
			servers.Store(int64(p.Servers))
		})
	}()
	const streaming = 10 // web and dns of both families, with their NodePorts, and self
	pace := time.NewTicker(leisurely)
	defer pace.Stop()
	for servers.Load() > streaming {
		l.talk()
		<-pace.C
	}
	l.endLong()
	if err := <-drained; err != nil {
		t.Error(err)
	}
	w.expectLeft(to, "")
	f.audit()
	f.clean()
	w.expectNoIPVS(before)
}

// TestIPVSInPlace: the data plane ipvs makes kube-proxy's virtual servers its own, with the connections through them.
func TestIPVSInPlace(t *testing.T) {
	t.Parallel()
	if needIPVS(t) {
		return
	}
	w, before, l := ipvsWorld(t, "legacy")
	const excluded = "10.96.0.10:9999" // as if on one of kube-proxy's addresses
	w.run("", "ipvsadm", "-A", "-t", excluded, "-s", "lc")
	f := w.startPlane(ipvs.New(ipvs.Options{}))
	l.await(20)
	exclude := func() []netip.Prefix { return []netip.Prefix{netip.MustParsePrefix("10.96.0.10/32")} }
	to := w.takeoverWith(takeover.Config{Log: w.logger(), Drain: time.Hour, Owned: ipvs.Owns, Exclude: exclude})
	w.remove(to)
	// Sources of connections are addresses of kube-ipvs0.
	if left := w.find(to); strings.Contains(left, "virtual servers") || !strings.HasPrefix(left, "1 kube-ipvs0 (link): for its connections") {
		t.Errorf("there is left\n%s", left)
	}
	l.await(40)
	l.endLong()
	l.streams = nil
	if err := to.Drain(t.Context(), nil); err != nil {
		t.Error(err)
	}
	w.expectLeft(to, "")
	f.audit()
	l.await(20)
	l.endShort()
	f.clean()
	w.run("", "ipvsadm", "-D", "-t", excluded)
	w.expectNoIPVS(before)
}

// TestIPVSBeside: kube-proxy in mode ipvs runs beside the data plane ipvs, is stopped, takes over from one that was killed,
// and gets all for itself.
func TestIPVSBeside(t *testing.T) {
	t.Parallel()
	if needIPVS(t) {
		return
	}
	for _, mode := range []ipvs.AddressMode{ipvs.CIDR, ipvs.Dummy} {
		t.Run(string(mode), func(t *testing.T) { beside(t, mode) })
	}
}

func beside(t *testing.T, mode ipvs.AddressMode) {
	w, before, l := ipvsWorld(t, "nft")
	f := w.startPlane(ipvs.New(ipvs.Options{AddressMode: mode}))
	to := w.takeoverWith(takeover.Config{
		Log: w.logger(), Drain: time.Hour, Owned: ipvs.Owns, OwnAlias: ipvs.DummyAlias,
		Exclude: func() []netip.Prefix { return []netip.Prefix{netip.MustParsePrefix("198.18.0.9/32")} },
	})
	w.remove(to)
	l.await(20)
	if left := w.find(to); strings.Contains(left, "kube-ipvs0") != (mode == ipvs.CIDR) {
		t.Errorf("in mode %s there is left\n%s", mode, left)
	}
	p := w.startKubeProxy("ipvs", ipvsFlags...)
	p.finishes(l)
	for range 3 { // as the engine and the daemon do all the time
		l.await(10)
		if _, err := f.Audit(w.Context(), f.state, dataplane.Quick); err != nil {
			t.Error(err)
		}
		w.remove(to)
		if err := f.Sync(w.Context(), f.state); err != nil {
			t.Error(err)
		}
	}
	l.await(10)
	p.stop()
	w.remove(to)
	if uses, err := to.UsesIPVS(); uses || err != nil {
		t.Errorf("kube-proxy uses IPVS: %t, %v", uses, err)
	}
	f.audit()
	l.await(10)

	if err := f.Close(); err != nil { // as if killed
		t.Error(err)
	}
	p = w.startKubeProxy("ipvs", ipvsFlags...)
	p.finishes(l)
	l.await(20)
	if uses, err := to.UsesIPVS(); !uses || err != nil {
		t.Errorf("kube-proxy uses IPVS: %t, %v", uses, err)
	}
	err := w.bed.Do(testbed.Node, func() error { return ipvs.Driver(ipvs.Options{}).HandBack(w.Context(), dataplane.Config{}) })
	if err != nil {
		t.Error(err)
	}
	l.await(20)
	if routes := w.run("", "ip", "route", "show", "table", "local", "proto", "250"); routes != "" {
		t.Errorf("local routes are left\n%s", routes)
	}
	p.stop()
	l.endShort()
	l.endLong()
	err = w.bed.Do(testbed.Node, func() error { return ipvs.Driver(ipvs.Options{}).Remove(w.Context(), dataplane.Config{}) })
	if err != nil {
		t.Error(err)
	}
	w.remove(w.takeover(0))
	w.expectNoIPVS(before)
}

// TestIPVSDeadline: what still talks is cut off, and served anew.
func TestIPVSDeadline(t *testing.T) {
	t.Parallel()
	if needIPVS(t) {
		return
	}
	w, before, l := ipvsWorld(t, "legacy")
	f := w.startFairlead()
	to := w.takeover(3 * time.Second)
	w.remove(to)
	l.await(10)
	if err := to.Drain(t.Context(), nil); err != nil {
		t.Error(err)
	}
	w.expectLeft(to, "")
	for _, s := range l.streams {
		if s.try.from != testbed.Node { // whose own the Service's address was: it is gone
			s.line = "" // a backend may be another one now
			if err := s.talk(); s.try.protocol == model.UDP && err != nil || errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("after the deadline, %s: %v", s.try, err)
			}
		}
		s.Close()
	}
	l.streams = nil
	l.await(20)
	l.endShort()
	f.audit()
	f.clean()
	w.expectNoIPVS(before)
}

// TestIPVSReturns: kube-proxy comes back while IPVS drains, and serves the same connections again.
func TestIPVSReturns(t *testing.T) {
	t.Parallel()
	if needIPVS(t) {
		return
	}
	w, before, l := ipvsWorld(t, "nft")
	f := w.startFairlead()
	to := w.takeover(time.Hour)
	w.remove(to)
	l.await(10)
	p := w.startKubeProxy("ipvs", ipvsFlags...)
	drained := make(chan error, 1)
	go func() { drained <- to.Drain(t.Context(), nil) }()
	pace := time.NewTicker(leisurely)
	defer pace.Stop()
	for done := false; !done; {
		select {
		case err := <-drained:
			if done = true; err == nil || !strings.Contains(err.Error(), "kube-proxy is back") {
				t.Errorf("with kube-proxy back: %v", err)
			}
		case <-pace.C:
			l.talk()
		}
	}
	if left := w.find(to); strings.Contains(left, "virtual servers (ipvs):") {
		t.Errorf("servers that take new connections do not drain:\n%s", left)
	}
	p.finishes(l)
	f.clean()
	l.await(20)
	p.stop()
	l.await(20)
	l.endShort()
	l.endLong()
	w.remove(w.takeover(0))
	w.expectNoIPVS(before)
}

// finishes waits until kube-proxy has made what it makes last, while connections are made.
func (p *kubeProxy) finishes(l *load) {
	p.w.Helper()
	for tool, last := range map[string]string{"iptables-save": "KUBE-CLUSTER-IP", "ip6tables-save": "KUBE-6-CLUSTER-IP"} {
		err := eventually.Poll(p.w.Context(), func() error {
			l.talk()
			if made := p.w.run("", tool); !strings.Contains(made, "--match-set "+last) {
				return fmt.Errorf("%s is not used in\n%s", last, made)
			}
			return nil
		})
		if err != nil {
			p.w.Fatalf("kube-proxy has not finished: %v\n%s", err, p.log)
		}
	}
}

// TestIPVSNow: fairlead clean does not wait, and a Drain without a beginning ends at once.
func TestIPVSNow(t *testing.T) {
	t.Parallel()
	if needIPVS(t) {
		return
	}
	w, before, l := ipvsWorld(t, "nft")
	l.endShort()
	l.endLong()
	to := w.takeover(0)
	left := w.find(to)
	if err := to.Drain(t.Context(), nil); err != nil {
		t.Error(err)
	}
	w.expectLeft(to, left)
	w.remove(to)
	w.expectLeft(to, "")
	w.expectNoIPVS(before)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := to.Drain(ctx, nil); err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// TestForeign: rules of others are found that match what mode ipvs has; not kube-proxy's own, nor those that match alike.
func TestForeign(t *testing.T) {
	t.Parallel()
	if needIPVS(t) {
		return
	}
	for backend, tool := range map[string]string{"legacy": "iptables-legacy", "nft": "nftables"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, backend)
			for _, set := range []string{"KUBE-CLUSTER-IP hash:ip,port", "KUBE-6-CLUSTER-IP hash:ip,port family inet6", "KUBE-SITE hash:ip"} {
				w.run("", append([]string{"ipset", "create"}, strings.Fields(set)...)...)
			}
			w.run(`*filter
:SITE - [0:0]
:KUBE-IPVS-FILTER - [0:0]
-A INPUT -i kube-ipvs0 -j DROP
-A INPUT -i kube-ipvs0 -j DROP
-A OUTPUT -o kube-ipvs0 -m comment --comment site -j ACCEPT
-A FORWARD -m comment --comment site -m ipvs --ipvs -j ACCEPT
-A SITE -i eth0 -m comment --comment kube-ipvs0 -j RETURN
-A SITE -s 198.18.0.7 -m set --match-set KUBE-CLUSTER-IP dst,dst -j RETURN
-A SITE -m set --match-set KUBE-SITE src -j RETURN
-A KUBE-IPVS-FILTER -m ipvs --ipvs -j RETURN
COMMIT
`, "iptables-restore")
			w.run("*mangle\n-A PREROUTING -m set --match-set KUBE-6-CLUSTER-IP dst,dst -j ACCEPT\nCOMMIT\n", "ip6tables-restore")
			w.run("table inet site { chain in { iifname kube-ipvs0 drop; iifname eth0 drop; }; }", "nft", "-f", "-")
			found, err := w.takeover(0).Foreign(t.Context())
			if err != nil {
				t.Error(err)
			}
			slices.Sort(found)
			want := strings.Split(strings.ReplaceAll(`TOOL ip filter FORWARD: -m ipvs
TOOL ip filter INPUT: kube-ipvs0
TOOL ip filter OUTPUT: kube-ipvs0
TOOL ip filter SITE: KUBE-CLUSTER-IP
TOOL ip6 mangle PREROUTING: KUBE-6-CLUSTER-IP
nftables inet site in: kube-ipvs0`, "TOOL", tool), "\n")
			slices.Sort(want)
			if !slices.Equal(found, want) {
				t.Errorf("it finds\n%s\nand not\n%s", strings.Join(found, "\n"), strings.Join(want, "\n"))
			}
		})
	}
}
