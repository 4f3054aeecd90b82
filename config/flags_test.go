package config_test

import (
	"bytes"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"fairlead.dev/fairlead/config"
)

const goldenFlags = "testdata/flags-1.37.1.txt"

// flagsIn reads what help says of flags: "name shorthand type default", a line each.
func flagsIn(help string) []string {
	entry := regexp.MustCompile(`(?m)^ +(?:-(\w), |    )--([\w-]+)(?: (\S+)|)(?:  .*)?$`)
	starts := entry.FindAllStringSubmatchIndex(help, -1)
	var lines []string
	for i, at := range starts {
		end := len(help)
		if i+1 < len(starts) {
			end = starts[i+1][0]
		}
		m := entry.FindStringSubmatch(help[at[0]:at[1]])
		value := regexp.MustCompile(`\(default (.*)\)\s*$`).FindStringSubmatch(strings.TrimSpace(help[at[0]:end]))
		line := "--" + m[2]
		if m[1] != "" {
			line += ", -" + m[1]
		}
		if m[3] != "" {
			line += " " + m[3]
		}
		if value != nil {
			line += " = " + value[1]
		}
		lines = append(lines, line)
	}
	slices.Sort(lines)
	return lines
}

// ours prints our flags as kube-proxy does, without what they mean.
func ours() string {
	set, bare := pflag.NewFlagSet("ours", pflag.ContinueOnError), pflag.NewFlagSet("bare", pflag.ContinueOnError)
	config.NewFlags("nftables").AddTo(set)
	set.VisitAll(func(f *pflag.Flag) {
		without := *f
		without.Usage = ""
		bare.AddFlag(&without)
	})
	return bare.FlagUsages()
}

func golden(t *testing.T) []string {
	t.Helper()
	text, err := os.ReadFile(goldenFlags)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(strings.TrimSpace(string(text)), "\n")
}

// TestEveryFlagOfKubeProxy looks for kube-proxy's flags among ours: name, shorthand, type and default.
func TestEveryFlagOfKubeProxy(t *testing.T) {
	have := flagsIn(ours())
	for _, line := range golden(t) {
		if !slices.Contains(have, line) {
			t.Errorf("lacking, or different: %s", line)
		}
	}
}

// TestDeprecatedFlags are not in the help, but accepted.
func TestDeprecatedFlags(t *testing.T) {
	_, c, err := load([]string{"--healthz-port=1", "--healthz-bind-address=127.0.0.1", "--metrics-port=0"})
	if err != nil {
		t.Fatal(err)
	}
	if got := c.HealthzAddress().String() + " " + c.MetricsAddress().String(); got != "127.0.0.1:1 invalid AddrPort" {
		t.Errorf("listeners: %s", got)
	}
}

// TestHelp groups all flags that are shown.
func TestHelp(t *testing.T) {
	const want = `
What it serves: manifests hostname-override node-ip bind-address once strict feature-gates
Configuration: config fairlead-config write-config-to
Instead of running: cleanup init-only version
Data plane: proxy-mode masquerade-all iptables-masquerade-bit iptables-min-sync-period ipvs-min-sync-period audit-interval counters flowtable take-over iptables-backend
Backends that do not answer: backend-health ejection-failures ejection-floor-percent ejection-time ejection-max-time ejection-slow-start reset-orphans
Node ports: nodeport-addresses iptables-localhost-nodeports
Pods: detect-local-mode cluster-cidr pod-bridge-interface pod-interface-name-prefix readiness-gate
Listeners: healthz-bind-address metrics-bind-address control-socket health-check-max-age bind-address-hard-fail metrics-services profiling show-hidden-metrics-for-version
Kernel settings: conntrack-max-per-core conntrack-min conntrack-tcp-timeout-established conntrack-tcp-timeout-close-wait conntrack-tcp-be-liberal conntrack-udp-timeout conntrack-udp-timeout-stream oom-score-adj
API server: kubeconfig master kube-api-content-type kube-api-qps kube-api-burst
Logging: v logging-format log-file
For mode ipvs: ipvs-address-mode ipvs-drain-timeout ipvs-scheduler ipvs-exclude-cidrs ipvs-strict-arp ipvs-tcp-timeout ipvs-tcpfin-timeout ipvs-udp-timeout
For mode ebpf: cgroup-root bpf-root ebpf-packets ebpf-acceleration ebpf-forwarding ebpf-sockets ebpf-abort-tcp ebpf-size-affinities ebpf-size-flows ebpf-size-sockets ebpf-size-translations ebpf-size-services
For mode userspace: userspace-redirect userspace-dial-timeout userspace-dials userspace-idle-timeout userspace-half-closed-timeout userspace-udp-timeout userspace-udp-stream-timeout userspace-max-connections userspace-max-flows
For Windows: windows-service network-name source-vip enable-dsr forward-healthcheck-vip root-hnsendpoint-name
Accepted, without meaning here: iptables-sync-period ipvs-sync-period config-sync-period vmodule log-flush-frequency log-text-split-stream log-text-info-buffer-size log-json-split-stream log-json-info-buffer-size
`
	var help bytes.Buffer
	if err := config.NewFlags("nftables").PrintHelp(&help, 100); err != nil {
		t.Fatal(err)
	}
	var got strings.Builder
	for line := range strings.Lines(help.String()) {
		switch m := regexp.MustCompile(`^ +(?:-\w, )?--([\w-]+)`).FindStringSubmatch(line); {
		case m != nil:
			got.WriteString(" " + m[1])
		case line != "\n" && line[0] != ' ':
			got.WriteString("\n" + strings.TrimSpace(line))
		}
		if n := len([]rune(strings.TrimRight(line, "\n"))); n > 100 {
			t.Errorf("%d columns: %s", n, line)
		}
	}
	if got.String()+"\n" != want {
		t.Errorf("--- got%s\n--- want%s", got.String(), want)
	}
}

// TestVersion is the flag alone and with each kind of value.
func TestVersion(t *testing.T) {
	for argument, want := range map[string]string{
		"--version": "true", "--version=raw": "raw", "--version=v1.37.9": "v1.37.9", "--version=false": "false",
		"--version=new": "error", "-v=2": "", "--version=1": "true",
	} {
		flags, _, err := load([]string{argument})
		got := string(flags.Version)
		if err != nil {
			got = "error"
		}
		if got != want {
			t.Errorf("%s: %q, want %q", argument, got, want)
		}
	}
}

// TestSchema has one for each kind, and none for others.
func TestSchema(t *testing.T) {
	for _, f := range config.Fields() {
		last := f.Path[strings.LastIndex(f.Path, ".")+1:]
		if !strings.Contains(string(config.Schema(f.Kind)), `"`+last+`": {`) {
			t.Errorf("the schema of %s lacks %s", f.Kind, f.Path)
		}
	}
	if text := config.Schema("KubeletConfiguration"); text != nil {
		t.Errorf("a schema of another kind: %s", text)
	}
}
