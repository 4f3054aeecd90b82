// Command list writes docs/metrics.md: every metric, as package metrics makes it.
package main

import (
	"fmt"
	"os"
	"strings"

	"fairlead.dev/fairlead/metrics"
)

const head = `# Metrics

<!-- written by "go generate ./metrics"; the words are those of /metrics -->

All of them are at ` + "`/metrics`" + ` on ` + "`metricsBindAddress`" + ` (port 10249), and ALPHA in Kubernetes' terms, as all of
kube-proxy's are. Beside them there is what each Go process of Kubernetes has: ` + "`process_*`, `go_*`," + `
` + "`rest_client_*`" + ` (requests to the API server) and ` + "`registered_metrics_total`." + ` ` + "`kubernetes_build_info`" + ` is left out: it
would tell alerts about version skew that a component of Kubernetes has another version.

## Those of kube-proxy

Name, type, labels and buckets are kube-proxy's (nftables mode of Kubernetes 1.37), so that its dashboards and alerts
go on working. Three things differ in kind:

* Both address families are programmed together, so what is not about one family is counted for both values of
  ` + "`ip_family`" + `, as two proxiers of kube-proxy would.
* ` + "`full`" + ` is a sync of everything, which happens at the start, after a failure and as a repair, and ` + "`partial`" + ` a change.
* ` + "`…last_timestamp_seconds`" + ` goes on with each audit, about once a second, that finds the kernel as it shall be.

` + "`kubeproxy_nftables_localhost_nodeport_rejected_packets_total`" + ` is missing: no rule of Fairlead's counts packets. So
are ` + "`kubeproxy_iptables_*`, `kubeproxy_sync_proxy_rules_iptables_*`" + ` and those of Windows, whatever ` + "`mode`" + ` says, as
those planes are not there.

`

func main() {
	if err := write(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "list:", err)
		os.Exit(1)
	}
}

func write(file string) error {
	var kubeproxy, own strings.Builder
	for _, d := range metrics.New(metrics.Options{}).List() {
		to := &own
		if strings.HasPrefix(d.Name, "kubeproxy_") {
			to = &kubeproxy
		}
		fmt.Fprintf(to, "| `%s` | %s | %s | %s |\n", d.Name, d.Type, strings.Join(d.Labels, ", "), d.Help)
	}
	const table = "| metric | type | labels | what it says |\n|---|---|---|---|\n"
	text := head + table + kubeproxy.String() + "\n## Fairlead's own\n\n" + table + own.String()
	return os.WriteFile(file, []byte(text), 0o644)
}
