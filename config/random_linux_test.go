package config_test

import (
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
)

// values are what a random file has at a path: the right ones first, then, after "|", wrong ones.
func values() map[string]string {
	const (
		span = "0s 1s 90m 1h30m | null -1s often 5"
		list = "[] null [primary] [all,10.0.0.0/8] [localhost] | [all,all] [eth0] primary [1]"
		bit  = "0 14 31 null | -1 32 4294967296 x"
		word = `"" a null | 1 [a]`
		yes  = "true false null | 1 maybe"
	)
	return map[string]string{
		"bindAddress":                     `"" 0.0.0.0 "::" 192.0.2.1 192.000.002.001 | host 1.2.3.4/8`,
		"bindAddressHardFail":             yes,
		"clientConnection.burst":          "0 7 null | -1 x",
		"clientConnection.kubeconfig":     word,
		"clientConnection.qps":            "0 1.5 -1 null | x",
		"clusterCIDR":                     `"" 10.0.0.0/8 "10.0.0.0/8,fd00::/64" | 10.0.0.0/8,11.0.0.0/8 pods 10.0.0.1`,
		"configSyncPeriod":                span,
		"conntrack.maxPerCore":            "0 1 null | -1 x",
		"conntrack.min":                   "0 1 null | -1 x",
		"conntrack.tcpBeLiberal":          yes,
		"conntrack.tcpCloseWaitTimeout":   span,
		"conntrack.tcpEstablishedTimeout": span,
		"conntrack.udpStreamTimeout":      span,
		"conntrack.udpTimeout":            span,
		"detectLocal.bridgeInterface":     "br0 | 7",
		"detectLocal.interfaceNamePrefix": "veth | 7",
		"detectLocalMode":                 `"" ClusterCIDR NodeCIDR BridgeInterface InterfaceNamePrefix | clustercidr 1`,
		"enableProfiling":                 yes,
		"featureGates.KubeProxyIPVS":      "true | maybe",
		"featureGates.AllAlpha":           "false | x",
		"healthzBindAddress":              `"" 0.0.0.0:1 127.0.0.1 "[::]:7" "::1" | 1.2.3.4:0 host:1 :1 5`,
		"hostnameOverride":                word,
		"iptables.localhostNodePorts":     yes,
		"iptables.masqueradeAll":          yes,
		"iptables.masqueradeBit":          bit,
		"iptables.minSyncPeriod":          "0s 2s | null x",
		"iptables.syncPeriod":             "0s 10s 1m | null x",
		"ipvs.excludeCIDRs":               "[] [10.0.0.0/8] null | [a] a",
		"ipvs.scheduler":                  `"" rr mh null | 1 [a]`,
		"ipvs.strictARP":                  yes,
		"ipvs.tcpTimeout":                 span,
		"logging.flushFrequency":          "0 5s 5000000000 null | -1s -5 x",
		"logging.format":                  `"" text json null | xml 1`,
		"logging.verbosity":               "0 4 null | -1 4294967295 x",
		"metricsBindAddress":              `"" 0.0.0.0:1 127.0.0.1 "[::]:7" "::1" | 1.2.3.4:0 host:1 :1 5`,
		"mode":                            `"" iptables ipvs nftables null | userspaces kernelspace 1`,
		"nftables.masqueradeAll":          yes,
		"nftables.masqueradeBit":          bit,
		"nftables.minSyncPeriod":          "0s 2s | null x",
		"nftables.syncPeriod":             "0s 10s 1m | null x",
		"nodePortAddresses":               list,
		"oomScoreAdj":                     "0 -1000 1000 null | -1001 1001 x",
		"portRange":                       word,
		"showHiddenMetricsForVersion":     `"" "1.36" null | "1.35" "1.37" v1.36 1.36`,
		"winkernel.enableDSR":             yes,
		"colour":                          "red",
		"iptables.colour":                 "red",
	}
}

// TestRandomFiles has kube-proxy and us read the same random files, of which most have something wrong.
func TestRandomFiles(t *testing.T) {
	program := kubernetes.NeedParts(t).Path("kube-proxy")
	random := rand.New(rand.NewPCG(sample.Seed(t), 0))
	accepted, refused := 0, 0
	for range 40 {
		text := randomFile(t, random)
		dir := t.TempDir()
		path, theirs := filepath.Join(dir, "config.conf"), filepath.Join(dir, "theirs")
		write(t, path, text)
		arguments := []string{"--config=" + path, "--write-config-to=" + theirs}
		_, loaded, err := load(arguments)
		output, theirErr := exec.CommandContext(t.Context(), program, arguments...).CombinedOutput()
		if (err == nil) != (theirErr == nil) {
			t.Fatalf("%s\nwe: %v\nkube-proxy: %s", text, err, output)
		}
		if err == nil {
			accepted++
			compareWritten(t, loaded, theirs)
		} else {
			refused++
			sameFields(t, err.Error(), string(output))
		}
		if t.Failed() {
			t.Fatalf("the file was\n%s", text)
		}
	}
	t.Logf("%d files accepted, %d refused", accepted, refused)
}

func randomFile(t *testing.T, random *rand.Rand) string {
	t.Helper()
	file := map[string]any{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}
	pools := values()
	var paths []string
	for path := range pools {
		paths = append(paths, path)
	}
	slices.Sort(paths)
	random.Shuffle(len(paths), func(i, j int) { paths[i], paths[j] = paths[j], paths[i] })
	faults := max(0, random.IntN(4)-1)
	for _, path := range append(paths[:random.IntN(len(paths))], "mode") {
		right, wrong, _ := strings.Cut(pools[path], "|")
		words := strings.Fields(right)
		// Errors in a section that no mode uses are accepted, and kube-proxy writes them unchanged.
		if faults > 0 && wrong != "" && !strings.HasPrefix(path, "ipvs.") && !strings.HasPrefix(path, "nftables.") {
			words, faults = strings.Fields(wrong), faults-1
		}
		var value any
		if err := yaml.Unmarshal([]byte(words[random.IntN(len(words))]), &value); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		put(file, path, value)
	}
	text, err := yaml.Marshal(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func put(file map[string]any, path string, value any) {
	section, name, nested := strings.Cut(path, ".")
	if !nested {
		file[path] = value
		return
	}
	inner, ok := file[section].(map[string]any)
	if !ok {
		inner = map[string]any{}
		file[section] = inner
	}
	inner[name] = value
}
