package daemon

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2"

	"github.com/spf13/pflag"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/iptables"
	"fairlead.dev/fairlead/dataplane/ipvs"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/host"
	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/source/kube"
)

func TestMain(m *testing.M) {
	if os.Getenv(asOther) != "" {
		os.Exit(other())
	}
	os.Exit(testbed.RunTests(m.Run))
}

// configured is the configuration that a file, and flags, make.
func configured(t *testing.T, file string, flags ...string) *config.Config {
	t.Helper()
	f := config.NewFlags(Planes()...)
	set := pflag.NewFlagSet("", pflag.ContinueOnError)
	f.AddTo(set)
	if file != "" {
		path := filepath.Join(t.TempDir(), "config.conf")
		text := "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n" + file
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		flags = append(flags, "--config", path)
	}
	if err := set.Parse(flags); err != nil {
		t.Fatal(err)
	}
	c, err := f.Load()
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestTableOptions(t *testing.T) {
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	all, localhost := "all", "127.0.0.0/8"
	for _, c := range []struct {
		file string
		want service.Options
	}{
		{"", service.Options{NodeName: strings.ToLower(name), NodePortAddresses: []string{all, localhost}, ExternalIPs: true}},
		{"mode: ipvs", service.Options{NodeName: strings.ToLower(name), NodePortAddresses: []string{all}, ExternalIPs: true}},
		{"mode: nftables", service.Options{NodeName: strings.ToLower(name), NodePortAddresses: []string{"primary"}, ExternalIPs: true}},
		{"mode: nftables\nhostnameOverride: Node.Example\nnftables: {masqueradeAll: true}\niptables: {masqueradeAll: false}\n" +
			"bindAddress: 192.0.2.7\nclusterCIDR: 10.0.0.0/8,fd00::/8\nfeatureGates: {AllowServiceExternalIPs: false}",
			service.Options{NodeName: "node.example", NodePortAddresses: []string{"primary"}, MasqueradeAll: true,
				NodeIPs: []netip.Addr{netip.MustParseAddr("192.0.2.7")},
				DetectLocal: service.DetectLocal{Mode: service.LocalClusterCIDR, ClusterCIDRs: []netip.Prefix{
					netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")}}}},
		{"mode: nftables\nhostnameOverride: one\ndetectLocalMode: NodeCIDR\nclusterCIDR: 10.0.0.0/8",
			service.Options{NodeName: "one", NodePortAddresses: []string{"primary"}, ExternalIPs: true,
				DetectLocal: service.DetectLocal{Mode: service.LocalNodeCIDR}}},
		{"mode: nftables\nhostnameOverride: one\ndetectLocalMode: BridgeInterface\ndetectLocal: {bridgeInterface: cni0, interfaceNamePrefix: veth}",
			service.Options{NodeName: "one", NodePortAddresses: []string{"primary"}, ExternalIPs: true,
				DetectLocal: service.DetectLocal{Mode: service.LocalBridgeInterface, Interface: "cni0"}}},
		{"mode: nftables\nhostnameOverride: one\ndetectLocalMode: InterfaceNamePrefix\ndetectLocal: {bridgeInterface: cni0, interfaceNamePrefix: veth}",
			service.Options{NodeName: "one", NodePortAddresses: []string{"primary"}, ExternalIPs: true,
				DetectLocal: service.DetectLocal{Mode: service.LocalInterfacePrefix, Interface: "veth"}}},
	} {
		c.want.Listeners = []netip.AddrPort{
			netip.MustParseAddrPort("0.0.0.0:10256"), netip.MustParseAddrPort("127.0.0.1:10249"),
		}
		c.want.Health = service.Health{Mode: service.HealthObserve, Failures: 3, Floor: 50,
			Time: 5 * time.Second, MaxTime: 5 * time.Minute, Slow: 10 * time.Second}
		got, err := tableOptions(configured(t, c.file))
		if err != nil || fmt.Sprintf("%+v", got) != fmt.Sprintf("%+v", c.want) {
			t.Errorf("%s\ngot  %+v %v\nwant %+v", c.file, got, err, c.want)
		}
	}
}

func TestPlaneSettings(t *testing.T) {
	for file, want := range map[string]planeSettings{
		"mode: nftables\nnftables: {masqueradeBit: 20}\niptables: {masqueradeBit: 3}": {name: "nftables", mark: 1 << 20, counters: dataplane.PerPool},
		"mode: iptables\nnftables: {masqueradeBit: 20}\niptables: {masqueradeBit: 3}": {name: "iptables", mark: 1 << 3, counters: dataplane.PerPool},
		"mode: ipvs\niptables: {masqueradeBit: 4}": {
			name: "ipvs", mark: 1 << 4, ipvs: ipvs.Options{AddressMode: ipvs.CIDR},
		},
		"mode: ipvs\nipvs: {scheduler: sh, strictARP: true, tcpTimeout: 1h, tcpFinTimeout: 2m, udpTimeout: 3s}": {
			name: "ipvs", mark: dataplane.DefaultMark, ipvs: ipvs.Options{Scheduler: "sh", StrictARP: true, AddressMode: ipvs.CIDR,
				Timeouts: ipvs.Timeouts{TCP: time.Hour, TCPFin: 2 * time.Minute, UDP: 3 * time.Second}},
		},
		"mode: nftables\nconntrack: {tcpBeLiberal: true}": {name: "nftables", mark: dataplane.DefaultMark, counters: dataplane.PerPool},
		"": {name: "iptables", mark: dataplane.DefaultMark, counters: dataplane.PerPool},
		"conntrack: {tcpBeLiberal: true}": {
			name: "iptables", mark: dataplane.DefaultMark, counters: dataplane.PerPool,
			iptables: iptables.Options{KeepInvalid: true},
		},
	} {
		if got := planeIn(configured(t, file)); got != want {
			t.Errorf("%s: %+v, want %+v", file, got, want)
		}
	}
	want := planeSettings{
		name: "iptables", mark: dataplane.DefaultMark, counters: dataplane.PerBackend,
		iptables: iptables.Options{Backend: iptables.Legacy},
	}
	if got := planeIn(configured(t, "", "--iptables-backend=legacy", "--counters=backends")); got != want {
		t.Errorf("--iptables-backend: %+v, want %+v", got, want)
	}
}

func TestHostSettings(t *testing.T) {
	got := hostSettings(configured(t, ""))
	score := *got.OOMScoreAdj
	got.OOMScoreAdj = nil
	want := host.Settings{MaxPerCore: 32768, Min: 131072, TCPEstablished: 24 * time.Hour, TCPCloseWait: time.Hour}
	if got != want || score != -999 {
		t.Errorf("%+v, %d", got, score)
	}
	got = hostSettings(configured(t, "conntrack: {maxPerCore: 0, min: 7, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 1m, "+
		"tcpBeLiberal: true, udpTimeout: 2m, udpStreamTimeout: 3m}\noomScoreAdj: 5"))
	score = *got.OOMScoreAdj
	got.OOMScoreAdj = nil
	want = host.Settings{Min: 7, TCPCloseWait: time.Minute, TCPBeLiberal: true, UDP: 2 * time.Minute, UDPStream: 3 * time.Minute}
	if got != want || score != 5 {
		t.Errorf("%+v, %d", got, score)
	}
}

func TestLogs(t *testing.T) {
	var out bytes.Buffer
	l := NewLogs(&out)
	log := l.Logger().With("a", 1).WithGroup("g")
	said := func(want ...string) {
		t.Helper()
		text := out.String()
		out.Reset()
		for _, w := range want {
			if !strings.Contains(text, w) {
				t.Errorf("the log has no %q, but\n%s", w, text)
			}
		}
		if len(want) == 0 && text != "" {
			t.Errorf("the log has\n%s", text)
		}
	}
	log.Debug("hidden")
	said()
	log.Warn(strings.Repeat("row\n", 10_000))
	said("and 9996 more")
	log.Info("shown", "b", 2)
	said("level=INFO", "msg=shown", "a=1", "g.b=2")
	l.Set(2, "text")
	log.Log(t.Context(), -2, "two")
	said("level=DEBUG", "msg=two")
	log.Debug("four")
	said()
	l.Set(4, "json")
	log.Debug("four")
	said(`"level":"DEBUG"`, `"a":1`)
	if err := l.setVerbosity("1"); err != nil {
		t.Error(err)
	}
	log.Debug("hidden")
	said()
	log.Info("still json")
	said(`"msg":"still json"`)
	if err := l.setVerbosity("much"); err == nil {
		t.Error("no error")
	}
	kube.LogTo(l.Logger())
	klog.V(3).Info("hidden")
	said()
	l.Set(3, "text")
	klog.V(3).Info("from a library")
	said("level=DEBUG", "from a library")
}

// recorded are Events, one line for each.
type recorded struct{ lines []string }

func (r *recorded) Close() {}

func (r *recorded) Emit(e kube.Event) {
	kind := "Normal"
	if e.Warning {
		kind = "Warning"
	}
	r.lines = append(r.lines, fmt.Sprintf("%s|%s|%s|%s|%t", e.Object, kind, e.Reason, e.Message, e.Everywhere))
}

func (r *recorded) take() []string {
	lines := r.lines
	r.lines = nil
	return lines
}

func TestReporter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		to := &recorded{}
		r := newReporter(to)
		expect := func(round engine.Round, want ...string) {
			t.Helper()
			r.Round(round)
			if got := to.take(); !slices.Equal(got, want) {
				t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
			}
		}
		expect(engine.Round{Problems: []service.Problem{
			{Object: "Service default/web", Field: "spec.ports[0]", Reason: "is bad"},
			{Object: "EndpointSlice default/web-1", Reason: "is bad"},
			{Object: "EndpointSlice default/web-2", Reason: "is silent", Cause: service.Unhealthy},
			{Object: "ServiceCIDR wide", Reason: "is bad"},
			{Object: "Node n", Field: "status", Reason: "is bad"},
			{Object: "manifests", Reason: "are bad"},
			{Object: "Namespace default", Reason: "its clients have used up its share"},
		}},
			"Service default/web|Warning|InvalidService|Service default/web: spec.ports[0]: is bad|true",
			"EndpointSlice default/web-1|Warning|InvalidEndpointSlice|EndpointSlice default/web-1: is bad|true",
			"EndpointSlice default/web-2|Warning|InvalidEndpointSlice|EndpointSlice default/web-2: is silent|false",
			"ServiceCIDR wide|Warning|InvalidServiceCIDR|ServiceCIDR wide: is bad|true",
			"|Warning|InvalidNode|Node n: status: is bad|false",
			"Namespace default|Warning|ShareUsedUp|Namespace default: its clients have used up its share|false")
		at := netip.MustParseAddrPort("192.0.2.1:30000")
		expect(engine.Round{Refused: []engine.Refusal{{Address: at, Service: "default/web", Err: errors.New("no")}, {Address: at, Err: errors.New("no")}}},
			"Service default/web|Warning|FailedToStartServiceHealthcheck|no|false",
			"|Warning|FailedToStartProxierHealthcheck|no|false")

		failing := engine.Round{Status: engine.Status{Error: "the kernel refuses"}}
		expect(failing, "|Warning|ProgrammingFailed|the kernel refuses|false")
		expect(failing) // said
		expect(engine.Round{}, "|Normal|ProgrammingRecovered|the data plane holds all rows again|false")
		expect(engine.Round{})
		failing.Status.Error = strings.Repeat("row\n", 10_000)
		expect(failing, "|Warning|ProgrammingFailed|row\nrow\nrow\nrow\nrow\nand 9996 more|false")
		expect(engine.Round{}, "|Normal|ProgrammingRecovered|the data plane holds all rows again|false")

		drift := engine.Round{Drifts: []dataplane.Drift{{Object: "table", Want: "fairlead"}, {Object: "map"}}}
		said := "|Warning|RulesRepaired|another program changed Fairlead's rules; repaired: " +
			"table: missing: fairlead and 1 more|false"
		expect(drift, said)
		bubble.Pass(driftPause - time.Second)
		expect(drift) // the other program insists
		bubble.Pass(2 * time.Second)
		expect(drift, said)

		lasting := engine.Round{Status: engine.Status{Problems: []service.Problem{
			{Object: "Service default/web", Reason: "is bad"},
			{Object: "EndpointSlice default/web-2", Reason: "is silent", Cause: service.Unhealthy},
		}}}
		expect(lasting) // said when it arose
		bubble.Pass(repeatTime)
		expect(lasting, "Service default/web|Warning|InvalidService|Service default/web: is bad|true")
		expect(lasting)

		var many []service.Problem
		for range 10 * maxProblems {
			many = append(many, service.Problem{Object: "Service a/b", Reason: "is bad"})
		}
		r.Round(engine.Round{Problems: many})
		if n := len(to.take()); n != maxProblems {
			t.Errorf("%d Events of one batch", n)
		}
		other := &recorded{}
		r.use(other)
		r.warn("Reason", "elsewhere")
		if got := other.take(); len(got) != 1 || len(to.take()) != 0 {
			t.Error(got)
		}
	})
}

func TestWatcher(t *testing.T) {
	dir, elsewhere := t.TempDir(), t.TempDir()
	file, linked, target := filepath.Join(dir, "config.conf"), filepath.Join(dir, "linked"), filepath.Join(elsewhere, "target")
	volume := t.TempDir()
	do := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	text := "" // of another length each time: times of files are not that fine
	write := func(path string) { t.Helper(); text += "x"; do(os.WriteFile(path, []byte(text), 0o644)) }
	write(file)
	write(target)
	do(os.Symlink(target, linked))
	mounted := filepath.Join(volume, "config.conf")
	for _, data := range []string{"..1", "..2"} {
		do(os.Mkdir(filepath.Join(volume, data), 0o755))
		write(filepath.Join(volume, data, "config.conf"))
	}
	do(os.Symlink("..1", filepath.Join(volume, "..data")))
	do(os.Symlink("..data/config.conf", mounted))

	w := newWatcher(time.Hour)
	defer w.close()
	files := []string{"", file, linked, mounted, filepath.Join(dir, "absent"), "/does/not/exist"}
	for _, c := range []struct {
		what string
		do   func()
	}{
		{"written in place", func() { write(file) }},
		{"replaced", func() { write(file + ".new"); do(os.Rename(file+".new", file)) }},
		{"deleted", func() { do(os.Remove(file)) }},
		{"made again", func() { write(file) }},
		{"one that was absent", func() { write(filepath.Join(dir, "absent")) }},
		{"written where a link leads", func() { write(target) }},
		{"a link that leads elsewhere", func() { do(os.Remove(linked)); do(os.Symlink(file, linked)) }},
		{"a ConfigMap", func() {
			do(os.Symlink("..2", filepath.Join(volume, "..data_tmp")))
			do(os.Rename(filepath.Join(volume, "..data_tmp"), filepath.Join(volume, "..data")))
		}},
	} {
		w.follow(files)
		c.do()
		eventually.Receive(t, c.what, w.changed)
	}
}
