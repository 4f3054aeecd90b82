package bench

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/testbed"
)

const trackRules = `table ip tracked {
	chain pre { type nat hook prerouting priority -100; }
	chain out { type nat hook output priority -100; }
	chain post { type nat hook postrouting priority 100; }
}
`

func BenchmarkFlowtable(b *testing.B) {
	if os.Getenv("FLOWVM") != "" && os.Getenv("FLOWIN") == "" {
		b.Setenv("FLOWIN", "1")
		runInTestKernel(b, "no flowtable")
		return
	}
	var arenas []*arena
	for range openArenas {
		arenas = append(arenas, newWideArena(b))
	}
	figures := map[string]Series{}
	variants := []string{"direct", "direct again", "tracked", "tracked flowtable", "nftables", "nftables flowtable"}
	next := rounds(b, roundsOf(b, 10))
	runtime.GC()
	for i := 0; next(); i++ {
		rand.Shuffle(len(variants), func(i, j int) { variants[i], variants[j] = variants[j], variants[i] })
		for _, v := range variants {
			all := *arenas[i%len(arenas)]
			a := &all
			a.tcp = a.tcp[len(a.tcp)-1:]
			func() {
				if strings.HasPrefix(v, "nftables") {
					to := netip.AddrPortFrom(serviceAddr(0), servicePort)
					rows := fmt.Sprintf("pods %s\n", testbed.ClusterCIDRs()[0]) + forward("web", to, remote(a.bed), "offcluster")
					end := contenders()[4].serve(b, a.bed, rows)
					defer end()
				}
				if strings.HasPrefix(v, "tracked") {
					nftf(b, a.bed, trackRules)
					defer nftf(b, a.bed, "delete table ip tracked")
				}
				if strings.HasSuffix(v, "flowtable") {
					nftf(b, a.bed, flowRules(b, a))
					defer nftf(b, a.bed, "delete table ip ft")
				}
				to := remote(a.bed)
				if strings.HasPrefix(v, "nftables") {
					to = netip.AddrPortFrom(serviceAddr(0), servicePort)
				}
				if err := a.to(clientPod, to).measureOpen(v, figures); err != nil {
					b.Error(err)
					b.FailNow()
				}
				if i < 1 && os.Getenv("FLOWSHOW") != "" {
					fmt.Println(v, command(b, a.bed, testbed.Node, "sh", "-c", "cat /proc/net/nf_conntrack; nft list ruleset | tail -20"))
				}
			}()
		}
	}
	kinds := []string{betweenTwo}
	for _, t := range traffics() {
		kinds = append(kinds, t.name, t.name+ofProcessor)
	}
	rows := [][]string{{"", "direct", "direct again", "tracked", "tracked flowtable", "nftables", "nftables flowtable"}}
	for _, kind := range kinds {
		control := figures[nameOpen(clientPod, kind, "direct")]
		row := []string{kind, show(control.Duration())}
		for _, v := range rows[0][2:] {
			of := figures[nameOpen(clientPod, kind, v)]
			ratio := control.Ratio(of)
			if strings.HasSuffix(kind, ofProcessor) {
				ratio = of.Ratio(control)
			}
			row = append(row, ratio.precise())
		}
		rows = append(rows, row)
	}
	printTable("flow", rows...)
	_ = time.Now
}

func flowRules(b *testing.B, a *arena) string {
	names := command(b, a.bed, testbed.Node, "sh", "-c", "ls /sys/class/net 2>/dev/null; ip -o link | awk -F': ' '{print $2}' | cut -d@ -f1")
	var devices []string
	seen := map[string]bool{"lo": true, "ifb0": true, "ifb1": true, "sit0": true, "teql0": true, "tunl0": true}
	for _, n := range strings.Fields(names) {
		if !seen[n] {
			devices = append(devices, n)
		}
		seen[n] = true
	}
	if os.Getenv("FLOWSHOW") != "" {
		fmt.Println(devices)
	}
	return `table ip ft {
	flowtable f { hook ingress priority 0; devices = { ` + strings.Join(devices, ", ") + ` }; }
	chain forwarding { type filter hook forward priority 0; ct state established meta l4proto { tcp, udp } flow add @f; }
}
`
}

func nftf(b *testing.B, bed *testbed.Bed, rules string) {
	b.Helper()
	f := b.TempDir() + "/r.nft"
	if err := os.WriteFile(f, []byte(rules), 0o600); err != nil {
		b.Fatal(err)
	}
	command(b, bed, testbed.Node, "nft", "-f", f)
}
