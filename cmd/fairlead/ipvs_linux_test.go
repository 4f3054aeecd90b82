package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/traffic"
	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/model"
)

// needIPVS plays a test in the test kernel if this one has no IPVS, and reports whether it did.
func needIPVS(t *testing.T) (played bool) {
	if _, err := os.Stat("/proc/net/ip_vs"); err == nil {
		return false
	}
	t.Parallel()
	alone(t)
	vm.Replay(t, "IPVS")
	return true
}

// configure writes the configuration files, of which the process has been told.
func (w *world) configure(mode, rest string) {
	w.Helper()
	text := "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n" +
		"clusterCIDR: 10.244.0.0/16\nmode: " + mode + "\n" + rest
	path := w.config()
	if err := errors.Join(os.WriteFile(path+".new", []byte(text), 0o644), os.Rename(path+".new", path)); err != nil {
		w.Fatal(err)
	}
}

func (w *world) config() string { return filepath.Join(filepath.Dir(w.socket), "config.yaml") }

// servers are the virtual servers as ipvsadm -Ln lists them, without numbers of connections.
func (w *world) servers() string {
	w.Helper()
	out, err := w.bed.Command(w.Context(), testbed.Node, "ipvsadm", "-Ln").CombinedOutput()
	if err != nil {
		w.Fatalf("ipvsadm: %v %s", err, out)
	}
	var servers []string
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		switch {
		case len(f) == 3 && strings.Contains(f[1], ":"):
			servers = append(servers, strings.Join(f, " ")+"\n")
		case len(f) == 6 && len(servers) > 0:
			servers[len(servers)-1] += "  " + strings.Join(f[1:4], " ") + "\n"
		}
	}
	slices.Sort(servers)
	return strings.Join(servers, "")
}

// becomes waits until something is so. IPVS remembers a connection for two minutes after both sides have closed it.
func (w *world) becomes(what, want string, is func() string) {
	w.Helper()
	eventually.Taking(2*time.Minute).Nil(w, what, func() error {
		if got := is(); got != want {
			return fmt.Errorf("there is\n%s\nwant\n%s", got, want)
		}
		return nil
	})
}

// tables are the tables of nf_tables, sorted.
func (w *world) tables() string {
	w.Helper()
	out, err := w.bed.Command(w.Context(), testbed.Node, "nft", "list", "tables").CombinedOutput()
	if err != nil {
		w.Fatalf("nft: %v %s", err, out)
	}
	return strings.Join(slices.Sorted(strings.Lines(string(out))), "")
}

// localRoutes are those of the data plane ipvs.
func (w *world) localRoutes() string {
	w.Helper()
	out, err := w.bed.Command(w.Context(), testbed.Node, "ip", "route", "show", "table", "local", "proto", "250").CombinedOutput()
	if err != nil {
		w.Fatalf("ip: %v %s", err, out)
	}
	return string(out)
}

// TestRun_ipvs changes between IPVS and other data planes while connections are made all the time. An open one stays with
// IPVS, which goes when that has ended.
func TestRun_ipvs(t *testing.T) {
	if needIPVS(t) {
		return
	}
	w := newWorld(t)
	const section = "ipvs: {scheduler: wlc, tcpTimeout: 30m, tcpFinTimeout: 1s}\n"
	w.configure("ipvs", section)
	p := w.start("--config", w.config())
	a, b := w.bed.Addr("pod-a", false), w.bed.Addr("pod-b", false)
	reals := "  " + netip.AddrPortFrom(a, 8080).String() + " Masq 1\n  " + netip.AddrPortFrom(b, 8080).String() + " Masq 1\n"
	want := "TCP 10.96.0.10:80 wlc\n" + reals + "TCP 192.0.2.1:30080 wlc\n" + reals
	w.becomes("ipvsadm -Ln", want, w.servers)
	_, out := w.execute("dump", "--control-socket", w.socket)
	if !strings.Contains(out, "\n# virtual server TCP 10.96.0.10:80 wlc: default/web cluster\n") {
		t.Errorf("dump says\n%s", out)
	}
	load := watch(t, w.bed, 50*time.Millisecond, traffic.Paths([]testbed.Place{testbed.Node, testbed.Outside, "pod-a"}, []netip.AddrPort{clusterIP, nodePort})...)
	for _, other := range []struct{ mode, tables string }{
		{"nftables", "table ip fairlead\ntable ip6 fairlead\n"},
		{"iptables", ""},
	} {
		conn, err := w.bed.Dial(t.Context(), testbed.Outside, model.TCP, nodePort)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		w.configure(other.mode, "")
		p.await("connections through another data plane stay open")
		if err := load.More(t.Context(), 50); err != nil {
			t.Error(err)
		}
		if _, err := io.WriteString(conn, "more\n"); err != nil {
			t.Error(err)
		}
		_ = conn.Close()
		w.becomes("what is left of IPVS in mode "+other.mode, "", func() string { return w.servers() + w.localRoutes() })
		w.configure("ipvs", section)
		w.becomes("ipvsadm -Ln", want, w.servers)
	}
	t.Log(w.tables())
	if r := load.Stop(); len(r.Faults) > 0 || r.Total().Answered < 100 {
		t.Errorf("while the data plane changed: %s", r)
	}
	if err := p.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = p.Wait()
	w.runs("fairlead", "clean", 0, "ipvs: removed what there was")
	if left := w.servers() + w.tables() + w.localRoutes(); left != "" {
		t.Errorf("after fairlead clean there is\n%s", left)
	}
}

// changing is what the modes of addresses have to do with: a Service CIDR, and addresses outside of it, one of which is
// the node's own.
const changing = `
apiVersion: networking.k8s.io/v1
kind: ServiceCIDR
metadata: {name: kubernetes}
spec: {cidrs: [10.96.0.0/16]}
---
apiVersion: v1
kind: Service
metadata: {name: outer}
spec:
  clusterIP: 10.96.0.11
  clusterIPs: [10.96.0.11]
  externalIPs: [192.0.2.1, 198.51.100.7]
  ports: [{port: 81, targetPort: 8080}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: outer, labels: {kubernetes.io/service-name: outer}}
addressType: IPv4
ports: [{port: 8080}]
endpoints:
- addresses: [POD-A]
- addresses: [POD-B]
`

// on has a command of a place print something.
func (w *world) on(place testbed.Place, name string, args ...string) string {
	w.Helper()
	out, err := w.bed.Command(w.Context(), place, name, args...).CombinedOutput()
	if err != nil {
		w.Fatalf("%s %s: %v %s", name, args, err, out)
	}
	return string(out)
}

// local are what of Services is local: our routes, and the interface's addresses.
func (w *world) local() string {
	w.Helper()
	var lines []string
	for line := range strings.Lines(w.localRoutes() + w.on(testbed.Node, "ip", "-br", "address")) {
		if strings.HasPrefix(line, "local") || strings.HasPrefix(line, "kube-ipvs0") {
			lines = append(lines, strings.Join(strings.Fields(line), " ")+"\n")
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "")
}

// others are all local routes that are not for Services, byte by byte.
func (w *world) others() string {
	w.Helper()
	var kept string
	for _, family := range []string{"-4", "-6"} {
		for line := range strings.Lines(w.on(testbed.Node, "ip", "-d", family, "route", "show", "table", "local")) {
			if !strings.Contains(line, "proto 250") && !strings.Contains(line, "kube-ipvs0") {
				kept += line
			}
		}
	}
	return kept
}

// addressModes is what is local in each, without some addresses.
func addressModes(without ...string) map[string]string {
	addresses := slices.DeleteFunc([]string{"10.96.0.10", "10.96.0.11", "198.51.100.7"},
		func(a string) bool { return slices.Contains(without, a) })
	ranged := !slices.Contains(without, "10.96.0.0/16")
	modes := map[string]string{"dummy": "kube-ipvs0 DOWN"}
	route := func(to string) string { return "local " + to + " dev lo scope host src 192.0.2.1 mtu 1500\n" }
	if ranged {
		modes["cidr"] = route("10.96.0.0/16")
	}
	for _, a := range addresses {
		modes["route"] += route(a)
		modes["dummy"] += " " + a + "/32"
		if ranged && strings.HasPrefix(a, "10.96.") {
			continue
		}
		modes["cidr"] += route(a)
	}
	modes["dummy"] += "\n"
	return modes
}

// setAddressMode writes the file that the process finds beside the other.
func (w *world) setAddressMode(mode string) {
	w.Helper()
	path := filepath.Join(filepath.Dir(w.socket), "fairlead.conf")
	text := fairleadConf + "ipvsAddressMode: " + mode + "\n"
	if err := errors.Join(os.WriteFile(path+".new", []byte(text), 0o644), os.Rename(path+".new", path)); err != nil {
		w.Fatal(err)
	}
}

// TestRun_ipvsAddresses goes from each address mode to each other, while connections are made all the time, and some
// are open. The node's own addresses stay as they are.
func TestRun_ipvsAddresses(t *testing.T) {
	if needIPVS(t) {
		return
	}
	w := newWorld(t)
	w.write("changing.yaml", changing)
	before := w.others()
	w.configure("ipvs", "")
	w.setAddressMode("cidr")
	p := w.start("--config", w.config())
	modes := addressModes()
	w.comesAndGoes(before)
	// IPVS tells answers apart by client and backend. So that no two connections have both, each client has an address of
	// its own to ask.
	clients := map[testbed.Place]netip.AddrPort{
		testbed.Node: netip.MustParseAddrPort("198.51.100.7:81"), testbed.Outside: clusterIP, "pod-a": nodePort,
		"pod-b": netip.MustParseAddrPort("192.0.2.1:81"),
	}
	load := w.watch(50*time.Millisecond, clients)
	var open []net.Conn
	for _, mode := range []string{"dummy", "route", "cidr", "route", "dummy", "cidr"} {
		for from, to := range clients {
			open = append(open, w.dial(from, to))
		}
		w.setAddressMode(mode)
		w.becomes("in mode "+mode, modes[mode], w.local)
		if err := load.Settle(t.Context(), 10); err != nil {
			t.Error(err)
		}
		for _, c := range open {
			w.talksOver(c, "in mode "+mode)
		}
		if others := w.others(); others != before {
			t.Errorf("in mode %s: of the local routes there were\n%s\nand are\n%s", mode, before, others)
		}
	}
	for _, c := range open {
		_ = c.Close()
	}
	if r := load.Stop(); len(r.Faults) > 0 || r.Total().Answered < 240 {
		t.Errorf("while addresses moved: %s", r)
	}
	w.setAddressMode("nonsense")
	p.await(`ipvsAddressMode: Unsupported value: \"nonsense\"`)
	if err := p.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = p.Wait()
	w.runs("fairlead", "clean", 0, "ipvs: removed what there was")
	if left := w.servers() + w.tables() + w.local(); left != "" {
		t.Errorf("after fairlead clean there is\n%s", left)
	}
	if others := w.others(); others != before {
		t.Errorf("of the local routes there were\n%s\nand are\n%s", before, others)
	}
}

// comesAndGoes takes away a Service one of whose addresses is the node's own, in each address mode.
func (w *world) comesAndGoes(before string) {
	w.Helper()
	for mode, want := range addressModes() {
		w.setAddressMode(mode)
		w.becomes("in mode "+mode, want, w.local)
		if err := os.Remove(filepath.Join(w.manifests, "changing.yaml")); err != nil {
			w.Fatal(err)
		}
		w.becomes("with one Service in mode "+mode, addressModes("10.96.0.11", "198.51.100.7", "10.96.0.0/16")[mode], w.local)
		if others := w.others(); others != before {
			w.Errorf("in mode %s: of the local routes there were\n%s\nand are\n%s", mode, before, others)
		}
		w.write("changing.yaml", changing)
		w.becomes("with the Service in mode "+mode, want, w.local)
	}
}

// dial opens a connection that has been answered.
func (w *world) dial(from testbed.Place, to netip.AddrPort) net.Conn {
	w.Helper()
	c, err := w.bed.Dial(w.Context(), from, model.TCP, to)
	if err == nil {
		_, err = c.Read(make([]byte, 128)) // the server speaks first
	}
	if err == nil {
		err = talk(c)
	}
	if err != nil {
		w.Fatalf("from %s to %s: %v", from, to, err)
	}
	return c
}

// talksOver reports a connection that broke.
func (w *world) talksOver(c net.Conn, when string) {
	w.Helper()
	if err := talk(c); err != nil {
		port := netip.MustParseAddrPort(c.LocalAddr().String()).Port()
		w.Errorf("%s: an open connection from %s to %s broke: %v; %s", when, c.LocalAddr(), c.RemoteAddr(), err, w.bed.OfPort(port))
	}
}

// talk has a server echo something.
func talk(c net.Conn) error {
	_ = c.SetDeadline(time.Now().Add(eventually.Patience()))
	if _, err := io.WriteString(c, "more\n"); err != nil {
		return err
	}
	_, err := c.Read(make([]byte, 128))
	return err
}

// TestRun_ipvsNeighbours: the node answers ARP and neighbour requests for a Service's address, in each address mode,
// unless ipvs.strictARP is set. It refuses every ping.
func TestRun_ipvsNeighbours(t *testing.T) {
	if needIPVS(t) {
		return
	}
	w := newWorld(t)
	w.write("changing.yaml", changing)
	modes := addressModes()
	outer := netip.MustParseAddrPort("198.51.100.7:81")
	w.on(testbed.Outside, "ip", "route", "replace", outer.Addr().String()+"/32", "dev", w.link(testbed.Outside))
	for _, strict := range []bool{false, true} {
		w.configure("ipvs", fmt.Sprintf("ipvs: {strictARP: %t}\n", strict))
		w.setAddressMode("cidr")
		p := w.start("--config", w.config())
		for mode, want := range modes {
			w.setAddressMode(mode)
			w.becomes("in mode "+mode, want, w.local)
			w.on(testbed.Outside, "ip", "neigh", "flush", "all")
			o, err := w.bed.Probe(t.Context(), testbed.Probe{From: testbed.Outside, To: outer})
			if answered := o.Result == testbed.Answered; err != nil || answered == strict {
				t.Errorf("in mode %s, with strictARP %t: %s, %v", mode, strict, o, err)
			}
			for from, want := range map[testbed.Place]string{
				testbed.Node: "not permitted", testbed.Outside: "unreachable port", "pod-a": "unreachable port",
			} {
				if got := w.ping(from, clusterIP.Addr()); got != want {
					t.Errorf("in mode %s: a ping from %s to %s: %s", mode, from, clusterIP, got)
				}
			}
			if got := w.ping(testbed.Outside, netip.MustParseAddr("192.0.2.1")); got != "echo" {
				t.Errorf("in mode %s: a ping of the node, an address of which is a Service's: %s", mode, got)
			}
		}
		if err := p.Process.Kill(); err != nil {
			t.Error(err)
		}
		_ = p.Wait()
	}
}

// link is the name of the interface that a place has its addresses on.
func (w *world) link(place testbed.Place) string {
	w.Helper()
	f := strings.Fields(w.on(place, "ip", "-o", "route", "get", "192.0.2.254"))
	return f[slices.Index(f, "dev")+1]
}

// ping sends an ICMP echo request, and tells what came back.
func (w *world) ping(from testbed.Place, to netip.Addr) string {
	w.Helper()
	var got string
	err := w.bed.Do(from, func() error {
		c, err := net.ListenPacket("ip4:icmp", "0.0.0.0")
		if err != nil {
			return err
		}
		defer c.Close()
		request := icmp.Message{Type: ipv4.ICMPTypeEcho, Body: &icmp.Echo{ID: 4711, Seq: 1}}
		b, err := request.Marshal(nil)
		if err != nil {
			return err
		}
		if _, err := c.WriteTo(b, &net.IPAddr{IP: to.AsSlice()}); errors.Is(err, unix.EPERM) {
			got = "not permitted" // refused before it was sent
			return nil
		} else if err != nil {
			return err
		}
		got, err = w.echo(c)
		return err
	})
	if err != nil {
		w.Errorf("ping from %s to %s: %v", from, to, err)
	}
	return got
}

// echo is the first answer to a ping.
func (w *world) echo(c net.PacketConn) (string, error) {
	const timeout = 5 * time.Second
	_ = c.SetDeadline(time.Now().Add(timeout))
	b := make([]byte, 1500)
	for {
		n, _, err := c.ReadFrom(b)
		if err != nil {
			return "", err
		}
		const protocol, port = 1, 3
		m, err := icmp.ParseMessage(protocol, b[:n])
		switch {
		case err != nil:
			return "", err
		case m.Type == ipv4.ICMPTypeEchoReply:
			return "echo", nil
		case m.Type == ipv4.ICMPTypeDestinationUnreachable && m.Code == port:
			return "unreachable port", nil
		}
	}
}
