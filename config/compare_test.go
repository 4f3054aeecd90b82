package config_test

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/tools/txtar"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/lab/allocs"
)

const (
	kubeProxyHead = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
	fairleadHead  = "apiVersion: fairlead.dev/v1alpha1\nkind: FairleadConfiguration\n"
)

// TestCompare edits the files under a running daemon, so to speak.
func TestCompare(t *testing.T) {
	cases := []struct {
		name, before, after     string
		fairlead, fairleadAfter string
		want                    string
		class                   config.Class
	}{
		{name: "nothing", before: "mode: iptables", after: "mode: iptables\nipvs: {scheduler: lc}", class: config.NoEffect,
			want: `ipvs.scheduler: from nothing to "lc" (no effect)`},
		{name: "the same in other words", before: "mode: ''", after: "mode: iptables\nmetricsBindAddress: 127.0.0.1:10249"},
		{name: "what the rows depend on", class: config.OnTable,
			after: "clusterCIDR: 10.0.0.0/8\nnodePortAddresses: [primary]\niptables: {masqueradeAll: true}\n" +
				"detectLocalMode: BridgeInterface\ndetectLocal: {bridgeInterface: br0}\nbindAddress: 192.0.2.1",
			want: `bindAddress: from "0.0.0.0" to "192.0.2.1" (on the table)
clusterCIDR: from nothing to "10.0.0.0/8" (on the table)
detectLocal.bridgeInterface: from nothing to "br0" (on the table)
detectLocalMode: from "ClusterCIDR" to "BridgeInterface" (on the table)
iptables.masqueradeAll: from false to true (on the table)
nodePortAddresses: from nothing to ["primary"] (on the table)`},
		{name: "what is beside them", class: config.InPlace,
			after: "logging: {verbosity: 4}\nhealthzBindAddress: 127.0.0.1:1\nconntrack: {min: 0}\nconfigSyncPeriod: 1m\n" +
				"iptables: {minSyncPeriod: 2s, syncPeriod: 1m}",
			want: `configSyncPeriod: from "15m0s" to "1m0s" (no effect)
conntrack.min: from 131072 to 0 (in place)
healthzBindAddress: from "0.0.0.0:10256" to "127.0.0.1:1" (in place)
iptables.minSyncPeriod: from "1s" to "2s" (in place)
iptables.syncPeriod: from "30s" to "1m0s" (no effect)
logging.verbosity: from 0 to 4 (in place)`},
		{name: "what counts at the start", class: config.AtStart,
			after: "bindAddressHardFail: true\nshowHiddenMetricsForVersion: '1.36'\nipvs: {scheduler: lc}",
			want: `bindAddressHardFail: from false to true (at the next start)
ipvs.scheduler: from nothing to "lc" (no effect)
showHiddenMetricsForVersion: from nothing to "1.36" (at the next start)`},
		{name: "what the engine is made of", class: config.Rebuild,
			after: "iptables: {masqueradeBit: 15}\nnftables: {masqueradeBit: 15}\nclientConnection: {qps: 50}",
			want: `clientConnection.qps: from 5 to 50 (rebuild)
iptables.masqueradeBit: from 14 to 15 (rebuild)
nftables.masqueradeBit: from 14 to 15 (no effect)`},
		{name: "Fairlead's own", class: config.Rebuild,
			fairlead:      "auditInterval: 1s\n",
			fairleadAfter: "auditInterval: 2s\nmanifests: [/etc/fairlead]\nnodeIPs: [192.0.2.1]\n",
			want: `auditInterval: from "1s" to "2s" (in place)
manifests: from nothing to ["/etc/fairlead"] (rebuild)
nodeIPs: from nothing to ["192.0.2.1"] (on the table)`},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			files := func(kubeProxy, fairlead string) {
				write(t, filepath.Join(dir, "config.conf"), kubeProxyHead+kubeProxy)
				write(t, filepath.Join(dir, "fairlead.conf"), fairleadHead+fairlead)
			}
			files(c.before, c.fairlead)
			flags, before, err := load([]string{"--config=" + filepath.Join(dir, "config.conf")})
			if err != nil {
				t.Fatal(err)
			}
			files(c.after, c.fairleadAfter)
			after, err := flags.Load()
			if err != nil {
				t.Fatal(err)
			}
			changes := config.Compare(before, after)
			if texts(changes) != c.want || highest(changes) != c.class {
				t.Errorf("%d:\n%s\nwant %d:\n%s", highest(changes), texts(changes), c.class, c.want)
			}
		})
	}
}

// texts are lines that say what has changed.
func texts(changes config.Changes) string {
	value := func(text string) string { return cmp.Or(text, "nothing") }
	classes := map[config.Class]string{
		config.NoEffect: "no effect", config.AtStart: "at the next start", config.InPlace: "in place",
		config.OnTable: "on the table", config.Rebuild: "rebuild",
	}
	var lines []string
	for _, c := range changes {
		lines = append(lines, fmt.Sprintf("%s: from %s to %s (%s)", c.Field, value(c.Old), value(c.New), classes[c.Class]))
	}
	return strings.Join(lines, "\n")
}

// highest is the class of the change that takes most.
func highest(changes config.Changes) (class config.Class) {
	for _, c := range changes {
		class = max(class, c.Class)
	}
	return class
}

// TestReloadOfWhatIsWrong leaves the caller with the Config that he has, and flags that go on working.
func TestReloadOfWhatIsWrong(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.conf")
	write(t, path, kubeProxyHead+"clusterCIDR: 10.0.0.0/8\n")
	flags, before, err := load([]string{"--config=" + path})
	if err != nil {
		t.Fatal(err)
	}
	write(t, path, kubeProxyHead+"clusterCIDR: pods\n")
	if c, err := flags.Load(); err == nil || c != nil || !strings.Contains(err.Error(), path+": clusterCIDR") {
		t.Errorf("a wrong file: %v, %v", c, err)
	}
	write(t, path, kubeProxyHead+"clusterCIDR: 10.0.0.0/8\n")
	after, err := flags.Load()
	if err != nil || len(config.Compare(before, after)) > 0 {
		t.Errorf("the file as it was: %v, %v", config.Compare(before, after), err)
	}
	files := strings.Join(before.Files, " ")
	if want := path + " " + filepath.Join(filepath.Dir(path), "fairlead.conf"); files != want {
		t.Errorf("files to watch: %s, want %s", files, want)
	}
}

// TestMeaningOfAddresses is what the daemon makes of a mode and of nodePortAddresses.
func TestMeaningOfAddresses(t *testing.T) {
	for arguments, want := range map[string]string{
		"":                      "all 127.0.0.0/8",
		"--proxy-mode=ipvs":     "all",
		"--proxy-mode=nftables": "primary",
		"--proxy-mode=nftables --nodeport-addresses=010.1.2.3/8,localhost":       "10.0.0.0/8 localhost",
		"--iptables-localhost-nodeports=false":                                   "all 127.0.0.0/32",
		"--nodeport-addresses=primary":                                           "primary",
		"--nodeport-addresses=localhost":                                         "::1/128 127.0.0.0/8",
		"--nodeport-addresses=127.0.0.1/32 --iptables-localhost-nodeports=false": "127.0.0.0/32",
		"--nodeport-addresses=10.0.0.0/8,0.0.0.0/0":                              "10.0.0.0/8 0.0.0.0/0 127.0.0.0/8",
	} {
		_, c, err := load(strings.Fields(arguments))
		if err != nil {
			t.Errorf("%s: %v", arguments, err)
			continue
		}
		if got := strings.Join(c.NodePortAddresses(), " "); got != want {
			t.Errorf("%q: NodePorts are open on %s, want %s", arguments, got, want)
		}
	}
}

// TestNodeIPs prefers what is Fairlead's own, family by family.
func TestNodeIPs(t *testing.T) {
	_, c, err := load([]string{"--bind-address=192.0.2.9", "--node-ip=fd00::1", "--feature-gates=AllowServiceExternalIPs=false"})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, ip := range c.NodeIPs() {
		got = append(got, ip.String())
	}
	if strings.Join(got, " ") != "fd00::1 192.0.2.9" {
		t.Errorf("node IPs: %v", got)
	}
	if c.Enabled("AllowServiceExternalIPs") || !c.Enabled("KubeProxyIPVS") || c.Enabled("NoSuchGate") {
		t.Error("gates are not as they were set")
	}
}

// defaults is the memory that each loading needs for flags, schemes and defaults, as a number of bytes of input.
const defaults = 20_000

// FuzzLoad feeds files: nothing panics, memory is bounded. Accepted files are written and accepted again, with the same
// meaning.
func FuzzLoad(f *testing.F) {
	paths, err := filepath.Glob("testdata/load/*.txtar")
	if err != nil {
		f.Fatal(err)
	}
	for _, path := range paths {
		archive, err := txtar.ParseFile(path)
		if err != nil {
			f.Fatal(err)
		}
		for _, file := range archive.Files {
			if strings.HasSuffix(file.Name, ".conf") {
				f.Add(file.Data)
			}
		}
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		path := filepath.Join(t.TempDir(), "config.conf")
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		for _, flag := range []string{"--config=", "--fairlead-config="} {
			var flags *config.Flags
			var before *config.Config
			var err error
			allocs.Bound(t, defaults+len(text), func() { flags, before, err = load([]string{flag + path}) })
			if err != nil {
				continue
			}
			kind := config.KubeProxyKind
			if flag == "--fairlead-config=" {
				kind = config.FairleadKind
			}
			text, err := before.Document(kind)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, text, 0o600); err != nil {
				t.Fatal(err)
			}
			after, err := flags.Load()
			if err != nil {
				t.Fatalf("what was written is refused: %v\n%s", err, text)
			}
			if changes := config.Compare(before, after); len(changes) > 0 {
				t.Errorf("what was written means something else: %s", texts(changes))
			}
		}
	})
}

// FuzzFlags reads arbitrary arguments, one a line: nothing panics, memory is bounded, and what is accepted can be
// written down. Those that name files are left out.
func FuzzFlags(f *testing.F) {
	for _, text := range []string{
		"--proxy-mode=nftables\n--nodeport-addresses=10.0.0.0/8,primary\n--v=4", "--feature-gates=AllAlpha=true,X=y",
		"--bind-address=::1\n--metrics-bind-address=[::]:10249\n--healthz-bind-address=0", "--ipvs-scheduler\nmh",
		"--cluster-cidr=10.244.0.0/16,fd00::/64\n--detect-local-mode=ClusterCIDR", "--min-sync-period=-1s\n--sync-period=1h",
		"--log-flush-frequency=0x1\n--masquerade-all=maybe\n--iptables-masquerade-bit=32",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		arguments := strings.Split(text, "\n")
		if strings.Contains(text, "config") {
			return // it names a file
		}
		var c *config.Config
		var err error
		allocs.Bound(t, defaults+len(text), func() {
			_, c, err = loadFor(arguments, "nftables", "ipvs", "iptables", "ebpf", "userspace")
		})
		if err != nil {
			return
		}
		for _, kind := range []string{config.KubeProxyKind, config.FairleadKind} {
			if _, err := c.Document(kind); err != nil {
				t.Error(err)
			}
		}
	})
}
