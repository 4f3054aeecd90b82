package conformance_test

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/eventually"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/ipvs"
	"fairlead.dev/fairlead/lab/conformance"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/model"
)

// TestIPVS_drain watches real servers whose backend leaves while there is a connection to it.
func TestIPVS_drain(t *testing.T) {
	t.Parallel()
	if !hasIPVS(t) {
		vm.Replay(t, "IPVS")
		return
	}
	for name, test := range map[string]struct {
		options ipvs.Options
		run     func(*drain)
	}{
		"goes when its connection has ended":       {ipvs.Options{}, (*drain).ends},
		"goes when its time is over":               {ipvs.Options{DrainTimeout: 5 * time.Second}, (*drain).timesOut},
		"its time goes on during repairs":          {ipvs.Options{DrainTimeout: 5 * time.Second}, (*drain).timesOutRepaired},
		"comes back":                               {ipvs.Options{}, (*drain).comesBack},
		"a port that is used again":                {ipvs.Options{}, (*drain).portUsedAgain},
		"a process that is killed":                 {ipvs.Options{}, (*drain).restarts},
		"UDP is forgotten at once":                 {ipvs.Options{}, (*drain).forgetsUDP},
		"UDP stays while the backend is listed":    {ipvs.Options{DrainTimeout: time.Nanosecond}, (*drain).keepsUDP},
		"rolling updates":                          {ipvs.Options{}, (*drain).rolls},
		"a Service that is gone":                   {ipvs.Options{}, (*drain).serviceGone},
		"addresses that are released":              {ipvs.Options{}, (*drain).releases},
		"addresses of marks that are released":     {ipvs.Options{}, (*drain).releasesMarks},
		"a Service whose number another one takes": {ipvs.Options{}, (*drain).numberUsedAgain},
	} {
		for family, v6 := range map[string]bool{"IPv4": false, "IPv6": true} {
			t.Run(name+"/"+family, func(t *testing.T) {
				t.Parallel()
				test.run(newDrain(t, test.options, v6))
			})
		}
	}
}

// Ports of drainRows, by protocol, and pod-a's real servers of them as the kernel prints these.
var (
	drainPorts = map[model.Protocol]string{
		model.TCP: "10.96.0.10:80", model.UDP: "10.96.0.10:53", model.SCTP: "10.96.0.10:3868",
	}
	drainDestinations = map[model.Protocol]string{
		model.TCP: "0AF4010B:1F90", model.UDP: "0AF4010B:14E9", model.SCTP: "0AF4010B:1B58",
	}
	connected = []model.Protocol{model.TCP, model.SCTP}
)

func (d *drain) ends() {
	flows := d.openAll(connected)
	d.apply(podALeft)
	d.audit()
	for p, flow := range flows {
		d.has(drainDestinations[p]+" Masq 0", true)
		flow.answers("pod-a")
		d.open(p, drainPorts[p], "pod-c")
		flow.abort()
	}
	d.until(drainDestinations[model.TCP], false)
	d.has(drainDestinations[model.SCTP], true) // the kernel remembers an aborted association for a minute
}

// timesOut: the client learns of it, and is not left waiting.
func (d *drain) timesOut() {
	flows := d.openAll(connected)
	d.apply(podALeft)
	for _, flow := range flows {
		flow.answers("pod-a")
	}
	for p, flow := range flows {
		d.until(drainDestinations[p], false)
		flow.fails()
	}
}

// timesOutRepaired has a plane that reads everything anew all the time, as where a row is refused.
func (d *drain) timesOutRepaired() {
	d.open(model.TCP, drainPorts[model.TCP], "pod-a").answers("pod-a")
	d.apply(podALeft)
	d.apply(drainRows)
	d.apply(podALeft)
	d.has(drainDestinations[model.TCP], true)
	d.wait(drainDestinations[model.TCP], false, func() { d.check(d.plane.Sync(d.Context(), d.state)) })
}

func (d *drain) comesBack() {
	flows := d.openAll(connected)
	d.apply(podALeft)
	d.apply(drainRows)
	d.audit()
	for p, flow := range flows {
		d.has(drainDestinations[p]+" Masq 1", true)
		d.open(p, drainPorts[p], "pod-a")
		flow.answers("pod-a")
	}
}

// portUsedAgain is what a client does whose port is fixed, as many of SCTP are.
func (d *drain) portUsedAgain() {
	flows := d.openAll(connected)
	d.apply(podALeft)
	for p, flow := range flows {
		d.has(drainDestinations[p]+" Masq 0", true)
		from := flow.LocalAddr()
		flow.abort()
		d.openFrom(from, p, "pod-c")
	}
}

// restarts: nothing but the kernel remembers what drains.
func (d *drain) restarts() {
	flows := d.openAll([]model.Protocol{model.TCP, model.SCTP, model.UDP})
	d.apply(podAListed)
	d.restart(podAListed)
	for _, flow := range flows {
		flow.answers("pod-a")
	}
	d.restart(podALeft)
	d.restart(podALeft)
	d.has(drainDestinations[model.UDP], false)
	flows[model.UDP].answers("pod-c")
	for _, p := range connected {
		d.has(drainDestinations[p]+" Masq 0", true)
		flows[p].answers("pod-a")
		d.open(p, drainPorts[p], "pod-c")
	}
	flows[model.TCP].abort()
	d.until(drainDestinations[model.TCP], false)
}

func (d *drain) forgetsUDP() {
	flow := d.open(model.UDP, drainPorts[model.UDP], "pod-a")
	d.apply(podALeft)
	d.has(drainDestinations[model.UDP], false)
	flow.answers("pod-c")
}

// keepsUDP: a backend that is listed with weight 0 terminates and still serves. The plane has no
// deadline of its own: the backend stays until the rows leave it out.
func (d *drain) keepsUDP() {
	flow := d.open(model.UDP, drainPorts[model.UDP], "pod-a")
	d.apply(podAListed)
	for range 16 {
		d.open(model.UDP, drainPorts[model.UDP], "pod-c")
	}
	d.audit()
	d.has(drainDestinations[model.UDP]+" Masq 0", true)
	flow.answers("pod-a")

	d.apply(drainRows)
	d.has(drainDestinations[model.UDP]+" Masq 1", true)
	flow.answers("pod-a")
	d.open(model.UDP, drainPorts[model.UDP], "pod-a")

	d.apply(podAListed)
	flow.answers("pod-a")
	d.apply(podALeft)
	d.has(drainDestinations[model.UDP], false)
	flow.answers("pod-c")
}

// rolls replaces the backend again and again, by one that has drained before in the end. Each terminates first, and
// serves meanwhile.
func (d *drain) rolls() {
	pods := [][2]string{
		{"pod-a", "10.244.1.11"}, {"pod-b", "10.244.1.12"}, {"pod-c", "10.244.2.13"}, {"pod-d", "10.244.2.14"},
	}
	kept := map[*drainFlow]string{}
	keep := func(pod string) {
		for _, p := range connected {
			kept[d.open(p, drainPorts[p], pod)] = pod
		}
	}
	d.apply(drainRows)
	flow := d.open(model.UDP, drainPorts[model.UDP], "pod-a")
	for n := range 2 * len(pods) {
		pod, next := pods[n%len(pods)], pods[(n+1)%len(pods)]
		serves := strings.ReplaceAll(drainRows, "10.244.1.11", pod[1])
		d.apply(serves)
		flow.answers(pod[0])
		keep(pod[0])

		d.apply(strings.NewReplacer("10.244.1.11", pod[1], "10.244.2.13", next[1]).Replace(podAListed))
		flow.answers(pod[0])
		d.open(model.UDP, drainPorts[model.UDP], next[0])
		keep(next[0])
		for f, pod := range kept {
			f.answers(pod)
		}
		d.audit()
	}
}

func (d *drain) serviceGone() {
	flow := d.open(model.TCP, "203.0.113.10:80", "pod-a")
	d.apply("guard 10.96.0.0/16 drop\n")
	d.audit()
	flow.answers("pod-a")
	o, err := d.bed.Probe(d.Context(), testbed.Probe{
		From: testbed.Outside, To: netip.MustParseAddrPort(d.text("203.0.113.10:80")), Protocol: model.TCP, Timeout: 15 * time.Second,
	})
	if err != nil || o.Result != testbed.Refused {
		d.Errorf("a new connection: %s, %v", o, err)
	}
}

// releases: a connection keeps its own address local, and no other.
func (d *drain) releases() {
	const other = "frontend 203.0.113.77:80/tcp any forward default/web:http cluster snat always\n"
	d.apply(drainRows + other)
	flow := d.open(model.TCP, "203.0.113.10:80", "pod-a")
	d.apply(podALeft + other)
	d.local("203.0.113.77", true)
	d.apply(podALeft)
	d.local("203.0.113.77", false)
	d.audit()
	flow.answers("pod-a")

	d.apply("guard 10.96.0.0/16 drop\n")
	d.audit()
	d.local("203.0.113.10", true)
	d.restart("guard 10.96.0.0/16 drop\n")
	d.local("203.0.113.10", true)
	flow.answers("pod-a")
	flow.abort()
	d.until(drainDestinations[model.TCP], false)
	d.local("203.0.113.10", false)
	d.audit()
}

// releasesMarks: a mark does not tell which addresses it is for.
func (d *drain) releasesMarks() {
	const (
		kept = "frontend 203.0.113.20:80/tcp internal forward default/old:http cluster snat never\n" +
			"frontend 203.0.113.20:80/tcp any drop default/old:http\n"
		other = "frontend 203.0.113.77:80/tcp any forward default/new:http cluster snat always\n"
		pods  = "backend default/old:http cluster 10.244.1.11:8080\nbackend default/new:http cluster 10.244.1.12:8080\n"
		old   = "backend default/old:http cluster 10.244.1.11:8080\n"
	)
	d.apply(podPrefix + kept + other + pods)
	flow := d.open(model.TCP, "203.0.113.20:80", "pod-a")
	d.apply(podPrefix + strings.Replace(other+pods, old, "", 1))
	d.apply(podPrefix)
	d.local("203.0.113.77", false)
	d.local("203.0.113.20", true)
	for range 2 {
		d.check(d.plane.Sync(d.Context(), d.state))
		d.audit()
		d.local("203.0.113.20", true)
	}
	d.restart(podPrefix)
	d.local("203.0.113.20", true)
	flow.answers("pod-a")
	flow.abort()
	d.until("Masq", false)
	d.local("203.0.113.20", false)
	d.audit()
}

// local looks whether an address is local for the sake of IPVS.
func (d *drain) local(a string, want bool) {
	d.Helper()
	var all string
	for _, family := range []string{"-4", "-6"} {
		out, err := d.bed.Command(d.Context(), testbed.Node,
			"ip", family, "route", "show", "table", "local", "proto", "250").CombinedOutput()
		d.check(err)
		all += string(out)
	}
	if strings.Contains(all, "local "+d.text(a)+" ") != want {
		d.Errorf("%s is local: %t\n%s", a, !want, all)
	}
}

// numberUsedAgain: virtual servers for clients of the node have numbers, of which the lowest that is free is taken.
func (d *drain) numberUsedAgain() {
	const tcp, udp = `
frontend 10.96.0.20:80/tcp internal forward default/old:http cluster snat never
backend default/old:http cluster 10.244.1.11:8080
`, `
frontend 10.96.0.20:53/udp internal forward default/new:dns cluster snat never
backend default/new:dns cluster 10.244.1.12:5353
`
	d.apply(podPrefix + tcp)
	old := d.open(model.TCP, "10.96.0.20:80", "pod-a")
	d.apply(podPrefix)
	d.apply(podPrefix + udp)
	flow := d.open(model.UDP, "10.96.0.20:53", "pod-b")
	d.audit()
	old.answers("pod-a")

	d.restart(podPrefix) // which learns of both from the kernel alone
	old.answers("pod-a")
	flow.unanswered()
	old.abort()
	d.until("Masq", false)
}

// TestIPVS_hostPorts tries what listens on the node at addresses that are local for the sake of IPVS.
func TestIPVS_hostPorts(t *testing.T) {
	t.Parallel()
	if !hasIPVS(t) {
		vm.Replay(t, "IPVS")
		return
	}
	for _, mode := range []ipvs.AddressMode{ipvs.CIDR, ipvs.Route, ipvs.Dummy} {
		for family, v6 := range map[string]bool{"IPv4": false, "IPv6": true} {
			t.Run(string(mode)+"/"+family, func(t *testing.T) {
				t.Parallel()
				newDrain(t, ipvs.Options{AddressMode: mode}, v6).hostPorts()
			})
		}
	}
}

// hostPorts: the node's listeners of 6443 (TCP) and 6053 (UDP) answer at its own addresses only.
func (d *drain) hostPorts() {
	for protocol, port := range map[model.Protocol]string{model.TCP: "6443", model.UDP: "6053"} {
		for _, from := range []testbed.Place{testbed.Outside, "client", testbed.Node} {
			for _, to := range []string{"203.0.113.10:", "10.96.0.10:", "10.96.0.99:"} {
				if o := d.hostPort(from, to+port, protocol, time.Second/4); o.Result == testbed.Answered {
					d.Errorf("%s to %s%s/%s: %s", from, to, port, protocol, o)
				}
			}
		}
		if o := d.hostPort(testbed.Outside, "192.0.2.1:"+port, protocol, 15*time.Second); o.Result != testbed.Answered {
			d.Errorf("the node's own address, port %s/%s: %s", port, protocol, o)
		}
	}
}

func (d *drain) hostPort(from testbed.Place, to string, p model.Protocol, limit time.Duration) testbed.Outcome {
	d.Helper()
	o, err := d.bed.Probe(d.Context(), testbed.Probe{
		From: from, To: netip.MustParseAddrPort(d.text(to)), Protocol: p, Timeout: limit,
	})
	d.check(err)
	return o
}

// TestIPVS_untracked tries the same where another program exempts packets from connection tracking, which table nat
// then does not see: neither the node's ports nor a frontend may answer.
func TestIPVS_untracked(t *testing.T) {
	t.Parallel()
	if !hasIPVS(t) {
		vm.Replay(t, "IPVS")
		return
	}
	for family, v6 := range map[string]bool{"IPv4": false, "IPv6": true} {
		t.Run(family, func(t *testing.T) {
			t.Parallel()
			d := newDrain(t, ipvs.Options{}, v6)
			d.apply(drainRows + "guard 10.96.0.10/32 reject\n")
			d.nft("add table inet other;" +
				"add chain inet other prerouting { type filter hook prerouting priority raw; };" +
				"add chain inet other output { type filter hook output priority raw; };" +
				"add rule inet other prerouting tcp dport { 80, 6443 } notrack;" +
				"add rule inet other output tcp dport { 80, 6443 } notrack;" +
				"add rule inet other output tcp sport { 80, 6443 } notrack")
			for _, from := range []testbed.Place{testbed.Outside, "client", testbed.Node} {
				for to, want := range map[string]testbed.Result{
					"203.0.113.10:6443": testbed.Refused, "203.0.113.10:80": testbed.Refused,
					"10.96.0.10:6443": testbed.Refused, "10.96.0.10:80": testbed.Answered,
					"10.96.0.99:6443": testbed.TimedOut,
					"192.0.2.1:6443":  testbed.Answered,
				} {
					limit := 15 * time.Second
					if want == testbed.TimedOut {
						limit = time.Second / 2
					}
					if o := d.hostPort(from, to, model.TCP, limit); o.Result != want {
						t.Errorf("%s to %s: %s; want %s", from, to, o, want)
					}
				}
			}
		})
	}
}

const drainRows = `
frontend 10.96.0.10:80/tcp any forward default/web:http cluster snat never
frontend 203.0.113.10:80/tcp any forward default/web:http cluster snat always
backend default/web:http cluster 10.244.1.11:8080
frontend 10.96.0.10:53/udp any forward default/web:dns cluster snat never
backend default/web:dns cluster 10.244.1.11:5353
frontend 10.96.0.10:3868/sctp any forward default/web:s1ap cluster snat never
backend default/web:s1ap cluster 10.244.1.11:7000
guard 10.96.0.0/16 drop
`

// podPrefix makes the pods' addresses known as such.
const podPrefix = "pods 10.244.0.0/16\nguard 10.96.0.0/16 drop\n"

// pod-c takes the place of pod-a, which has left, or is still listed but takes nothing new.
var (
	podALeft   = strings.ReplaceAll(drainRows, "10.244.1.11", "10.244.2.13")
	podAListed = podALeft + `
backend default/web:http cluster 10.244.1.11:8080 weight 0
backend default/web:dns cluster 10.244.1.11:5353 weight 0
backend default/web:s1ap cluster 10.244.1.11:7000 weight 0
`
)

// drain is a plane on a cluster, with drainRows at first.
type drain struct {
	*testing.T
	bed   *testbed.Bed
	v6    bool
	new   dataplane.New
	plane dataplane.Dataplane
	state *model.State
}

func newDrain(t *testing.T, o ipvs.Options, v6 bool) *drain {
	bed, err := conformance.NewBed(t.Context(), false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = bed.Close() })
	d := &drain{T: t, bed: bed, v6: v6, state: model.NewState()}
	d.new = conntrack.Wrap(ipvs.New(o))
	d.start()
	t.Cleanup(func() { _ = d.plane.Close() })
	d.apply(drainRows)
	return d
}

// start opens the plane and brings it to the State.
func (d *drain) start() {
	d.Helper()
	d.check(d.bed.Do(testbed.Node, func() (err error) {
		if d.plane, err = d.new(dataplane.Config{}); err != nil {
			return err
		}
		return d.plane.Sync(d.Context(), d.state)
	}))
}

// restart leaves the kernel to another process, which finds other rows.
func (d *drain) restart(rows string) {
	d.Helper()
	d.check(d.plane.Close()) // as the end of a process does
	next, err := model.ParseState(d.text(rows))
	d.check(err)
	d.state = next
	d.start()
	d.audit()
}

func (d *drain) check(err error) {
	d.Helper()
	if err != nil {
		d.Fatal(err)
	}
}

func (d *drain) apply(rows string) {
	d.Helper()
	next, err := model.ParseState(d.text(rows))
	d.check(err)
	change := model.Diff(d.state, next)
	d.state = next
	d.check(d.plane.Apply(d.Context(), next, change))
}

// audit has the plane look at what drains, which is no drift.
func (d *drain) audit() {
	d.Helper()
	report, err := d.plane.Audit(d.Context(), d.state, dataplane.Quick)
	if err != nil || len(report.Drifts) > 0 {
		d.Errorf("audit: %v, %v", report.Drifts, err)
	}
}

// servers are the virtual servers as the kernel prints them, with single spaces.
func (d *drain) servers() string {
	d.Helper()
	out, err := d.bed.Command(d.Context(), testbed.Node, "cat", "/proc/net/ip_vs").CombinedOutput()
	d.check(err)
	return strings.Join(strings.Fields(string(out)), " ")
}

// text is the form of rows or an address in the test's family.
func (d *drain) text(v4 string) string {
	if d.v6 {
		return conformance.EmbedText(v4)
	}
	return v4
}

// real is the same for a real server as the kernel prints it.
func (d *drain) real(v4 string) string {
	if hex, rest, ok := strings.Cut(v4, ":"); d.v6 && ok {
		hex = strings.ToLower(hex)
		return "[fd00" + strings.Repeat(":0000", 5) + ":" + hex[:4] + ":" + hex[4:] + "]:" + rest
	}
	return v4
}

func (d *drain) has(real string, want bool) {
	d.Helper()
	if text := d.servers(); strings.Contains(text, d.real(real)) != want {
		d.Errorf("%q is there: %t\n%s", real, !want, text)
	}
}

// until calls Audit, as the engine does again and again, until a real server is there or not.
func (d *drain) until(real string, want bool) {
	d.Helper()
	d.wait(real, want, d.audit)
}

func (d *drain) wait(real string, want bool, look func()) {
	d.Helper()
	eventually.Nil(d, fmt.Sprintf("%q is there: %t", real, want), func() error {
		look()
		if servers := d.servers(); strings.Contains(servers, d.real(real)) != want {
			return fmt.Errorf("there is\n%s", servers)
		}
		return nil
	})
}

// drainFlow is an open connection or UDP socket.
type drainFlow struct {
	net.Conn
	*testing.T
	lines *bufio.Reader
}

// openAll opens a connection of each protocol, to pod-a.
func (d *drain) openAll(protocols []model.Protocol) map[model.Protocol]*drainFlow {
	d.Helper()
	flows := map[model.Protocol]*drainFlow{}
	for _, p := range protocols {
		flows[p] = d.open(p, drainPorts[p], "pod-a")
	}
	return flows
}

// open connects, and wants a pod to answer.
func (d *drain) open(p model.Protocol, to, pod string) *drainFlow {
	d.Helper()
	c, err := d.bed.Dial(d.Context(), "client", p, netip.MustParseAddrPort(d.text(to)))
	d.check(err)
	d.Cleanup(func() { _ = c.Close() })
	f := &drainFlow{c, d.T, bufio.NewReader(c)}
	if p == model.UDP {
		f.answers(pod)
	} else { // the first line comes unasked
		f.reads(pod)
	}
	return f
}

// openFrom connects once from a client's port.
func (d *drain) openFrom(client net.Addr, p model.Protocol, pod string) {
	d.Helper()
	from, err := netip.ParseAddrPort(client.String())
	d.check(err)
	o, err := d.bed.Probe(d.Context(), testbed.Probe{
		From: "client", SourcePort: from.Port(), To: netip.MustParseAddrPort(d.text(drainPorts[p])), Protocol: p,
		Timeout: 10 * time.Second, // the kernel drops the first packet of SCTP, which is sent again after three
	})
	if err != nil || o.Result != testbed.Answered || o.Backend != pod {
		d.Errorf("%s from the port of an earlier connection: %s, %v; want an answer of %s", p, o, err, pod)
	}
}

// abort ends a connection without the exchange of packets that IPVS remembers for two minutes.
func (f *drainFlow) abort() {
	f.Helper()
	if tcp, ok := f.Conn.(*net.TCPConn); ok {
		if err := tcp.SetLinger(0); err != nil {
			f.Error(err)
		}
	}
	if err := f.Close(); err != nil {
		f.Error(err)
	}
}

func (f *drainFlow) answers(pod string) {
	f.Helper()
	f.asks()
	f.reads(pod)
}

func (f *drainFlow) asks() {
	f.Helper()
	if err := f.SetWriteDeadline(time.Now().Add(eventually.Patience())); err != nil {
		f.Error(err)
	}
	if _, err := f.Write([]byte("?\n")); err != nil {
		f.Error(err)
	}
}

func (f *drainFlow) reads(pod string) {
	f.Helper()
	if err := f.SetReadDeadline(time.Now().Add(eventually.Patience())); err != nil {
		f.Error(err)
	}
	line, err := f.lines.ReadString('\n')
	if name, _, _ := strings.Cut(line, " "); err != nil || name != pod {
		f.Errorf("%q, %v; want an answer of %s", line, err, pod)
	}
}

// fails asks, and expects a refusal.
func (f *drainFlow) fails() {
	f.Helper()
	if err := f.SetDeadline(time.Now().Add(eventually.Patience())); err != nil {
		f.Error(err)
	}
	_, err := f.Write([]byte("?\n"))
	if err == nil {
		_, err = f.lines.ReadString('\n')
	}
	if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		f.Errorf("%v; want another error", err)
	}
}

// unanswered asks in vain.
func (f *drainFlow) unanswered() {
	f.Helper()
	f.asks()
	if err := f.SetReadDeadline(time.Now().Add(time.Second / 2)); err != nil {
		f.Error(err)
	}
	if line, err := f.lines.ReadString('\n'); err == nil {
		f.Errorf("%q, though nobody should answer", line)
	}
}
