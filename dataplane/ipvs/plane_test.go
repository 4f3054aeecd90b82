package ipvs_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/ipvs"
	"fairlead.dev/fairlead/lab/testbed/nstest"
	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/model"
)

func TestMain(m *testing.M) {
	vm.Guest()
	os.Exit(m.Run())
}

// TestPlane is one test for the test kernel, which takes longer to start than all of them to run.
func TestPlane(t *testing.T) {
	if _, err := ipvs.New(ipvs.Options{})(dataplane.Config{}); errors.Is(err, dataplane.ErrUnsupported) {
		vm.Replay(t, "IPVS")
		return
	}
	for name, test := range map[string]func(*namespace){
		"what it installs can be listed": (*namespace).canBeListed,
		"a restart changes nothing":      (*namespace).restart,
		"repairs":                        (*namespace).repairs,
		"repairs rules":                  (*namespace).repairsRules,
		"leaves others alone":            (*namespace).others,
		"repairs virtual servers":        (*namespace).repairsServers,
		"timeouts":                       (*namespace).timeouts,
		"a refused timeout":              (*namespace).refusedTimeout,
		"strict ARP":                     (*namespace).strictARP,
		"another version":                (*namespace).anotherVersion,
		"takes over":                     (*namespace).takesOver,
		"remove leaves nothing":          (*namespace).remove,
		"a refused row":                  (*namespace).refused,
		"a refused element":              (*namespace).refusedElement,
		"a scheduler that is missing":    (*namespace).missingScheduler,
		"schedulers":                     (*namespace).schedulers,
		"addresses of the node":          (*namespace).ownAddresses,
		"address modes":                  (*namespace).modes,
		"kube-proxy's interface":         (*namespace).findsKubeProxys,
		"prepare":                        (*namespace).prepare,
		"closed twice":                   (*namespace).closedTwice,
		"health checks":                  (*namespace).healthChecks,
	} {
		t.Run(name, func(t *testing.T) { inNamespace(t, test) })
	}
}

// namespace is a network namespace that goes with the test's thread.
type namespace struct {
	*testing.T
	options ipvs.Options
}

func inNamespace(t *testing.T, f func(*namespace)) {
	t.Helper()
	nstest.Run(t, func(t *testing.T) {
		n := &namespace{T: t}
		n.run("ip", "link", "set", "lo", "up")
		f(n)
	})
}

// check ends the test's goroutine, which is not the one that FailNow is for.
func (n *namespace) check(err error) {
	n.Helper()
	if err != nil {
		n.Error(err)
		runtime.Goexit()
	}
}

func (n *namespace) open() dataplane.Dataplane {
	n.Helper()
	p, err := ipvs.New(n.options)(dataplane.Config{})
	n.check(err)
	n.Cleanup(func() { _ = p.Close() })
	return p
}

func (n *namespace) sync(rows string) dataplane.Dataplane {
	n.Helper()
	p := n.open()
	n.check(p.Sync(context.Background(), n.parse(rows)))
	return p
}

func (n *namespace) parse(rows string) *model.State {
	n.Helper()
	s, err := model.ParseState(rows)
	n.check(err)
	return s
}

// audit has a plane that knows nothing yet compare the kernel with rows.
func (n *namespace) audit(rows string) (lines []string) {
	n.Helper()
	report, err := n.open().Audit(context.Background(), n.parse(rows), dataplane.Quick)
	n.check(err)
	for _, d := range report.Drifts {
		lines = append(lines, d.String())
	}
	slices.Sort(lines)
	return lines
}

func (n *namespace) equal(have, want string) {
	n.Helper()
	if have != want {
		n.Errorf("have\n%s\nwant\n%s", have, want)
	}
}

// kernel is all that a plane may have left in the namespace.
func (n *namespace) kernel() string {
	n.Helper()
	return n.servers() + n.run("nft", "list", "ruleset") +
		n.run("ip", "route", "show", "table", "local", "proto", "250") + n.run("ip", "-br", "link")
}

// servers are the virtual servers as "ipvsadm -Ln" has them, without numbers of connections.
func (n *namespace) servers() string {
	n.Helper()
	b, err := os.ReadFile("/proc/thread-self/net/ip_vs")
	n.check(err)
	var out strings.Builder
	const header = 3
	for _, line := range strings.Split(strings.TrimSpace(string(b)), "\n")[header:] {
		words := strings.Fields(line)
		fmt.Fprintln(&out, strings.Join(words[:min(len(words), 4)], " "))
	}
	return out.String()
}

func (n *namespace) run(name string, args ...string) string {
	n.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		n.Errorf("%s %s: %v: %s", name, args, err, out)
	}
	return string(out)
}

const example = `
backend default/web:http cluster 10.244.1.2:8080 local
backend default/web:http cluster 10.244.2.2:8080
backend default/web:http cluster 10.244.2.3:8080 weight 2
backend default/web:http cluster6 [fd00::1]:8080
backend default/web:http local 10.244.1.2:8080 local
frontend 10.96.0.10:80/tcp any forward default/web:http cluster snat offcluster
frontend 10.96.0.10:81/tcp any reject default/web:admin
frontend 10.96.0.10:82/udp any drop default/web:none
frontend 203.0.113.1:80/tcp any forward default/web:http local snat never allow 10.0.0.0/8,192.0.2.0/24
frontend 203.0.113.1:80/tcp internal forward default/web:http cluster snat always
frontend [fd00::10]:80/tcp any forward default/web:http cluster6 snat offcluster allow fd00::/64
guard 10.96.0.0/16 drop
guard 10.96.0.10/32 reject
guard 10.96.7.0/24 reject
guard fd00::10/128 reject
pods 10.244.0.0/16
pods interface cali*
pool default/web:http cluster affinity 3h0m0s
pool default/web:http cluster6
pool default/web:http local
`

const exampleServers = `FWM FA100001 wrr
-> 0AF40102:1F90 Masq 1
-> 0AF40202:1F90 Masq 1
-> 0AF40203:1F90 Masq 2
TCP 0A60000A:0050 wrr
-> 0AF40102:1F90 Masq 1
-> 0AF40202:1F90 Masq 1
-> 0AF40203:1F90 Masq 2
TCP CB007101:0050 rr
-> 0AF40102:1F90 Masq 1
TCP [fd00:0000:0000:0000:0000:0000:0000:0010]:0050 rr
-> [fd00:0000:0000:0000:0000:0000:0000:0001]:1F90 Masq 1
`

// blocks sorts the virtual servers, which the kernel lists as it hashes them, and each one's real servers.
func blocks(text string) string {
	var all []string
	for _, block := range strings.Split("\n"+text, "\n")[1:] {
		if strings.HasPrefix(block, "->") {
			all[len(all)-1] += "\n" + block
		} else if block != "" {
			all = append(all, block)
		}
	}
	for i, block := range all {
		lines := strings.Split(block, "\n")
		slices.Sort(lines[1:])
		all[i] = strings.Join(lines, "\n")
	}
	slices.Sort(all)
	return strings.Join(all, "\n") + "\n"
}

func (n *namespace) canBeListed() {
	n.sync(example)
	n.equal(blocks(n.servers()), exampleServers)
	rules := n.run("nft", "list", "ruleset")
	for _, want := range []string{
		"10.96.0.10 . tcp . 80", "map @affinity-", "chain remember-", "chain recall-", "chain forward-internal-snat-always-affinity {",
	} {
		if !strings.Contains(rules, want) {
			n.Errorf("no %q in\n%s", want, rules)
		}
	}
	n.equal(n.run("ip", "-o", "route", "show", "table", "local", "proto", "250"),
		"local 10.96.0.0/16 dev lo scope host \nlocal 203.0.113.1 dev lo scope host \n")
}

func (n *namespace) restart() {
	n.sync(example)
	before := n.kernel()
	if drifts := n.audit(example); len(drifts) > 0 {
		n.Errorf("drifts: %s", drifts)
	}
	n.sync(example)
	n.equal(n.kernel(), before)
}

func (n *namespace) repairs() {
	p := n.sync(example)
	before := n.kernel()
	n.run("ip", "route", "del", "local", "203.0.113.1", "table", "local")
	n.run("ip", "-6", "route", "del", "local", "fd00::10", "table", "local")
	n.run("ip", "route", "change", "local", "10.96.0.0/16", "dev", "lo", "table", "local", "proto", "250", "src", "127.0.0.1")
	n.run("nft", "delete", "element", "ip", "fairlead-ipvs", "frontends", "{ 10.96.0.10 . tcp . 80 }")
	n.run("nft", "add", "element", "ip", "fairlead-ipvs", "drop-ranges", "{ 10.97.0.0/16 }")
	n.run("nft", "add", "chain", "ip6", "fairlead-ipvs", "mine")
	n.check(os.WriteFile("/proc/sys/net/ipv4/vs/conntrack", []byte("0"), 0))
	state := n.parse(example)
	report, err := p.Audit(context.Background(), state, dataplane.Quick)
	n.check(err)
	var lines []string
	for _, d := range report.Drifts {
		lines = append(lines, d.String())
	}
	slices.Sort(lines)
	n.equal(strings.Join(lines, "\n"), `/proc/sys/net/ipv4/vs/conntrack: is 0, should be 1
frontend 10.96.0.10:80/tcp any: missing: forward default/web:http cluster snat offcluster
guard 10.97.0.0/16: surplus: another element of drop-ranges in table ip fairlead-ipvs
local address: missing: 10.96.0.0/16
local address: missing: 203.0.113.1/32
local address: missing: fd00::10/128
table ip6 fairlead-ipvs: chain mine: surplus: a chain that is not ours`)
	n.check(p.Sync(context.Background(), state))
	n.equal(n.kernel(), before)
}

// repairsRules finds a chain without rules, and nothing else amiss.
func (n *namespace) repairsRules() {
	p, state := n.sync(example), n.parse(example)
	before := n.kernel()
	n.run("nft", "flush", "chain", "ip", "fairlead-ipvs", "internal")
	report, err := p.Audit(context.Background(), state, dataplane.Quick)
	n.check(err)
	const missing = "table ip fairlead-ipvs: chain internal: missing: its rules"
	var lines []string
	for _, d := range report.Drifts {
		lines = append(lines, d.String())
	}
	n.equal(strings.Join(lines, "\n"), missing)
	n.check(p.Sync(context.Background(), state))
	n.equal(n.kernel(), before)
}

// repairsServers changes what no generation tells of.
func (n *namespace) repairsServers() {
	p := n.sync(example)
	state := n.parse(example)
	n.run("ipvsadm", "-D", "-t", "203.0.113.1:80")
	n.run("ipvsadm", "-E", "-t", "10.96.0.10:80", "-s", "lc")
	n.run("ipvsadm", "-d", "-t", "10.96.0.10:80", "-r", "10.244.1.2:8080")
	n.run("ipvsadm", "-e", "-t", "10.96.0.10:80", "-r", "10.244.2.2:8080", "-m", "-w", "5")
	n.run("ipvsadm", "-a", "-t", "10.96.0.10:80", "-r", "10.244.9.9:8080", "-m")
	report, err := p.Audit(context.Background(), state, dataplane.Quick)
	n.check(err)
	var lines []string
	for _, d := range report.Drifts {
		lines = append(lines, d.String())
	}
	slices.Sort(lines)
	n.equal(strings.Join(lines, "\n"), `virtual server 10.96.0.10:80/tcp: is lc, should be wrr
virtual server 10.96.0.10:80/tcp: is real server 10.244.2.2:8080 weight 5, should be real server 10.244.2.2:8080 weight 1
virtual server 10.96.0.10:80/tcp: missing: real server 10.244.1.2:8080 weight 1
virtual server 10.96.0.10:80/tcp: surplus: real server 10.244.9.9:8080 weight 1
virtual server 203.0.113.1:80/tcp: missing: scheduler rr, 1 real servers`)
	n.check(p.Sync(context.Background(), state))
	_, err = p.Audit(context.Background(), state, dataplane.Quick) // what leaves has no connections
	n.check(err)
	n.equal(blocks(n.servers()), exampleServers)
}

func (n *namespace) timeouts() {
	n.options.Timeouts = ipvs.Timeouts{TCP: time.Hour, UDP: time.Minute}
	p := n.sync(example)
	const hour = "Timeout (tcp tcpfin udp): 3600 120 60\n"
	list := func() string { return n.run("ipvsadm", "-l", "--timeout") }
	n.equal(list(), hour)
	for drifts, change := range map[string][]string{
		"": {"0", "0", "0"}, // as it is
		"ipvs.tcpTimeout: is 10m0s, should be 1h0m0s\nipvs.udpTimeout: is 1m1s, should be 1m0s": {"600", "0", "61"},
	} {
		n.run("ipvsadm", append([]string{"--set"}, change...)...)
		n.equal(n.drifts(p, example), drifts)
		n.check(p.Sync(context.Background(), n.parse(example)))
		n.equal(list(), hour)
	}

	n.options.Timeouts = ipvs.Timeouts{TCP: 2 * time.Hour, TCPFin: 3 * time.Minute, UDP: 4 * time.Minute}
	n.sync("")
	n.equal(list(), "Timeout (tcp tcpfin udp): 7200 180 240\n")
}

// refusedTimeout is one that is too long for any kernel: all else is in force.
func (n *namespace) refusedTimeout() {
	n.options.Timeouts = ipvs.Timeouts{TCP: 596520 * time.Hour, TCPFin: 3 * time.Minute}
	p := n.open()
	err := p.Sync(context.Background(), n.parse(example))
	if !errors.Is(err, dataplane.ErrPartial) || !strings.Contains(err.Error(), "IPVS refuses ipvs.tcpTimeout 596520h0m0s:") {
		n.Errorf("Sync: %v", err)
	}
	n.equal(blocks(n.servers()), exampleServers)
	n.equal(n.run("ipvsadm", "-l", "--timeout"), "Timeout (tcp tcpfin udp): 900 180 300\n")
	n.equal(n.drifts(p, example), "")
}

// drifts are those that a plane finds, sorted.
func (n *namespace) drifts(p dataplane.Dataplane, rows string) string {
	n.Helper()
	report, err := p.Audit(context.Background(), n.parse(rows), dataplane.Quick)
	n.check(err)
	var lines []string
	for _, d := range report.Drifts {
		lines = append(lines, d.String())
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// strictARP sets what keeps the node from answering for Service addresses; without it that stays as it is.
func (n *namespace) strictARP() {
	const dir = "/proc/sys/net/ipv4/conf/all/"
	values := func() string { return n.run("cat", dir+"arp_ignore", dir+"arp_announce") }
	n.sync(example)
	n.equal(values(), "0\n0\n")
	n.options.StrictARP = true
	p := n.sync(example)
	n.equal(values(), "1\n2\n")
	n.check(os.WriteFile(dir+"arp_ignore", []byte("0"), 0))
	n.equal(n.drifts(p, example), dir+"arp_ignore: is 0, should be 1")
	n.check(p.Sync(context.Background(), n.parse(example)))
	n.equal(values(), "1\n2\n")
}

func (n *namespace) others() {
	n.sync(example)
	n.run("nft", "add", "table", "ip", "mine")
	n.run("ip", "route", "add", "local", "198.51.100.9", "dev", "lo", "table", "local")
	n.run("ipvsadm", "-A", "-t", "198.51.100.9:80", "-s", "wlc")
	n.run("ipvsadm", "-A", "-f", "1", "-s", "wlc")
	p := n.sync(example)
	n.check(p.Remove(context.Background()))
	n.equal(blocks(n.servers()), "FWM 00000001 wlc\nTCP C6336409:0050 wlc\n")
	n.equal(n.run("nft", "list", "tables"), "table ip mine\n")
	if routes := n.run("ip", "route", "show", "table", "local"); !strings.Contains(routes, "local 198.51.100.9") {
		n.Errorf("somebody's route is gone:\n%s", routes)
	}
}

// anotherVersion finds tables that this one would not have made. They serve until others take their place.
func (n *namespace) anotherVersion() {
	before := n.kernel()
	for _, foreign := range [][]string{
		{"add", "set", "ip", "fairlead-ipvs", "other", "{ type mark; }"},
		{"add", "element", "ip", "fairlead-ipvs", "classes", "{ 0x7fffffff : drop }"},
	} {
		n.sync(example)
		n.run("nft", foreign...)
		n.run("ipvsadm", "-D", "-t", "203.0.113.1:80")
		p, err := ipvs.New(n.options)(dataplane.Config{Fault: func(operation string) error {
			table := n.run("nft", "list", "table", "ip", "fairlead-ipvs")
			if !strings.Contains(table, "hook input") || !strings.Contains(table, "goto refuse") {
				n.Errorf("before %q there are no rules", operation)
			}
			return nil
		}})
		n.check(err)
		n.check(errors.Join(p.Sync(context.Background(), n.parse(example)), p.Close()))
		if drifts := n.audit(example); len(drifts) > 0 {
			n.Errorf("drifts: %s", drifts)
		}
		// The mark of the table that served was its own until then.
		n.equal(blocks(n.servers()), strings.Replace(exampleServers, "FA100001", "FA100003", 1))
		n.run("nft", foreign...)
		n.sync("")
		n.equal(n.servers(), "")
		n.run("nft", foreign...)
		n.check(n.open().Remove(context.Background()))
		n.equal(n.kernel(), before)
	}
}

// takesOver finds virtual servers that kube-proxy may have made where its own shall be.
func (n *namespace) takesOver() {
	n.run("ipvsadm", "-A", "-t", "10.96.0.10:80", "-s", "mh", "-p", "60")
	n.run("ipvsadm", "-a", "-t", "10.96.0.10:80", "-r", "10.244.1.2:8080", "-m", "-w", "7")
	n.run("ipvsadm", "-a", "-t", "10.96.0.10:80", "-r", "10.244.2.2:8080", "-i")
	n.run("ipvsadm", "-a", "-t", "10.96.0.10:80", "-r", "10.244.9.9:8080", "-m")
	n.sync(example)
	leaving := "-> 0AF40909:1F90 Masq 0\n"
	n.equal(strings.Replace(blocks(n.servers()), leaving, "", 1), exampleServers)
}

func (n *namespace) remove() {
	before := n.kernel()
	n.sync(example)
	if n.kernel() == before {
		n.Error("nothing was installed")
	}
	settings := n.sysctls()
	n.check(n.open().Remove(context.Background())) // by another process
	n.equal(n.kernel(), before)
	n.equal(n.sysctls(), settings) // as kube-proxy's, they stay
}

func (n *namespace) sysctls() string {
	n.Helper()
	return n.run("grep", "-r", "", "/proc/sys/net/ipv4/vs/", "/proc/sys/net/ipv4/conf/all/")
}

// missingScheduler has the kernel make one that it has no module for.
func (n *namespace) missingScheduler() {
	const rows = `
frontend 10.96.0.10:80/tcp any forward default/web:http cluster snat never
backend default/web:http cluster 10.244.1.2:8080
frontend 10.96.0.11:80/tcp any forward default/odd:http cluster snat never
backend default/odd:http cluster 10.244.1.2:8080
`
	var log strings.Builder
	state := n.parse(rows)
	web := model.PoolID{Service: "default/web:http"}
	pool := state.Pools[web]
	pool.Scheduler = "mh"
	state.Pools[web] = pool
	p, err := ipvs.New(ipvs.Options{Scheduler: "nonsense"})(dataplane.Config{Log: slog.New(slog.NewTextHandler(&log, nil))})
	n.check(err)
	n.check(errors.Join(p.Sync(context.Background(), state), p.Sync(context.Background(), state)))
	n.equal(blocks(n.servers()), "TCP 0A60000A:0050 mh\n-> 0AF40102:1F90 Masq 1\nTCP 0A60000B:0050 wrr\n-> 0AF40102:1F90 Masq 1\n")
	report, err := p.Audit(context.Background(), state, dataplane.Quick)
	if err != nil || len(report.Drifts) > 0 {
		n.Errorf("%v, %v", report.Drifts, err)
	}
	const want = `no scheduler nonsense; load module ip_vs_nonsense`
	if strings.Count(log.String(), want) != 1 || !strings.Contains(log.String(), ` scheduler=wrr`) {
		n.Errorf("the log should say once %q, but has\n%s", want, log.String())
	}
	n.check(p.Close())
}

// refusedElement has allowed sources that overlap, which the kernel does not take. All else is in force.
func (n *namespace) refusedElement() {
	s := n.parse(example)
	key := model.Key{Addr: netip.MustParseAddr("203.0.113.1"), Port: 80, Protocol: model.TCP}
	row := s.Frontends[key]
	row.Allow = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("10.1.0.0/16")}
	s.Frontends[key] = row
	p := n.open()
	err := p.Sync(context.Background(), s)
	if !errors.Is(err, dataplane.ErrPartial) || !strings.Contains(err.Error(), "203.0.113.1") {
		n.Errorf("Sync: %v; want the kernel's refusal, with the address", err)
	}
	n.equal(blocks(n.servers()), exampleServers)
	report, err := p.Audit(context.Background(), s, dataplane.Quick)
	n.check(err)
	if len(report.Drifts) != 1 || !strings.Contains(report.Drifts[0].String(), "203.0.113.1") {
		n.Errorf("more than the refused element is missing: %v", report.Drifts)
	}
	next := s.Clone()
	next.Guards[netip.MustParsePrefix("10.97.0.0/16")] = model.Drop
	if err := p.Apply(context.Background(), next, model.Diff(s, next)); err != nil {
		n.Errorf("a change after the refusal: %v", err)
	}
	row.Allow = row.Allow[:1]
	next.Frontends[key] = row
	n.check(p.Sync(context.Background(), next))
	report, err = p.Audit(context.Background(), next, dataplane.Quick)
	if err != nil || len(report.Drifts) > 0 {
		n.Errorf("when the row is mended: %v, %v", report.Drifts, err)
	}
}

// refused has a backend that no kernel takes.
func (n *namespace) refused() {
	const rows = `
frontend 10.96.0.10:80/tcp any forward default/web:http cluster snat never
backend default/web:http cluster 10.244.1.2:8080
frontend 10.96.0.11:80/tcp any forward default/odd:http cluster snat never
backend default/odd:http cluster 224.0.0.12:8080
`
	err := n.open().Sync(context.Background(), n.parse(rows))
	if !errors.Is(err, dataplane.ErrPartial) || !strings.Contains(err.Error(), "10.96.0.11:80/tcp") {
		n.Errorf("%v is not about the refused backend", err)
	}
	n.equal(blocks(n.servers()), "TCP 0A60000A:0050 rr\n-> 0AF40102:1F90 Masq 1\nTCP 0A60000B:0050 rr\n")
}

// schedulers tries each that the model knows.
func (n *namespace) schedulers() {
	for _, name := range model.Schedulers() {
		state := n.parse("frontend 10.96.0.10:80/tcp any forward default/web:http cluster snat never\n" +
			"backend default/web:http cluster 10.244.1.2:8080\n")
		id := model.PoolID{Service: "default/web:http"}
		pool := state.Pools[id]
		pool.Scheduler = name
		state.Pools[id] = pool
		p := n.open()
		n.check(p.Sync(context.Background(), state))
		if have := n.servers(); !strings.HasPrefix(have, "TCP 0A60000A:0050 "+name) {
			n.Errorf("scheduler %s: %s", name, have)
		}
		report, err := p.Audit(context.Background(), state, dataplane.Quick)
		if err != nil || len(report.Drifts) > 0 {
			n.Errorf("scheduler %s: %v, %v", name, report.Drifts, err)
		}
	}
}

func (n *namespace) ownAddresses() {
	n.run("ip", "address", "add", "203.0.113.1/32", "dev", "lo")
	n.sync(example)
	routes := n.run("ip", "-o", "route", "show", "table", "local", "proto", "250")
	n.equal(routes, "local 10.96.0.0/16 dev lo scope host \n")
	n.run("ip", "address", "del", "203.0.113.1/32", "dev", "lo")
	if drifts := n.audit(example); len(drifts) == 0 {
		n.Error("nobody notices that the address is gone")
	}
}

// addresses are those of ours that are local, by the address modes.
func (n *namespace) addresses() string {
	n.Helper()
	text := n.run("ip", "-o", "route", "show", "table", "local", "proto", "250") +
		n.run("ip", "-o", "-6", "route", "show", "table", "local", "proto", "250")
	if links := n.run("ip", "-br", "link"); strings.Contains(links, "kube-ipvs0") {
		text += n.run("ip", "-br", "address", "show", "dev", "kube-ipvs0")
	}
	var lines []string
	for line := range strings.Lines(text) {
		lines = append(lines, strings.Join(strings.Fields(line), " ")+"\n")
	}
	slices.Sort(lines)
	return strings.Join(lines, "")
}

func addressModes() map[ipvs.AddressMode]string {
	return map[ipvs.AddressMode]string{
		ipvs.CIDR: "local 10.96.0.0/16 dev lo scope host\nlocal 203.0.113.1 dev lo scope host\n" +
			"local fd00::10 dev lo metric 1024 pref medium\n",
		ipvs.Route: "local 10.96.0.10 dev lo scope host\nlocal 203.0.113.1 dev lo scope host\n" +
			"local fd00::10 dev lo metric 1024 pref medium\n",
		ipvs.Dummy: "kube-ipvs0 DOWN 10.96.0.10/32 203.0.113.1/32 fd00::10/128\n",
	}
}

// modes goes from each address mode to each. The objects of others stay as they were.
func (n *namespace) modes() {
	rangeless := strings.Replace(example, "guard 10.96.0.0/16 drop\n", "", 1)
	before := n.kernel()
	local := n.run("ip", "-d", "route", "show", "table", "local") + n.run("ip", "-d", "-6", "route", "show", "table", "local")
	for from := range addressModes() {
		for to, want := range addressModes() {
			n.options.AddressMode = from
			n.sync(example)
			n.options.AddressMode = to
			if drifts := n.audit(example); (len(drifts) > 0) != (from != to) {
				n.Errorf("from %s to %s: drifts: %s", from, to, drifts)
			}
			p := n.sync(example)
			n.equal(n.addresses(), want)
			if drifts := n.audit(example); len(drifts) > 0 {
				n.Errorf("%s: drifts: %s", to, drifts)
			}
			// Addresses of a range are local by themselves when the range goes, and by the range when it comes back.
			n.check(p.Apply(context.Background(), n.parse(rangeless), model.Diff(n.parse(example), n.parse(rangeless))))
			if drifts := n.audit(rangeless); len(drifts) > 0 {
				n.Errorf("%s, without the range: drifts: %s", to, drifts)
			}
			n.check(p.Apply(context.Background(), n.parse(example), model.Diff(n.parse(rangeless), n.parse(example))))
			n.equal(n.addresses(), want)
			n.check(p.Apply(context.Background(), n.parse(""), model.Diff(n.parse(example), n.parse(""))))
			if to == ipvs.Dummy {
				n.equal(n.addresses(), "kube-ipvs0 DOWN\n")
			} else {
				n.equal(n.addresses(), "")
			}
		}
	}
	n.check(n.open().Remove(context.Background()))
	n.equal(n.kernel(), before)
	n.equal(n.run("ip", "-d", "route", "show", "table", "local")+n.run("ip", "-d", "-6", "route", "show", "table", "local"), local)
}

// findsKubeProxys finds kube-proxy's interface, with more on it than is wanted.
func (n *namespace) findsKubeProxys() {
	before := n.kernel()
	n.run("ip", "link", "add", "kube-ipvs0", "type", "dummy")
	for _, address := range []string{"10.96.0.10/32", "10.96.0.66/32", "198.51.100.7/32"} {
		n.run("ip", "address", "add", address, "dev", "kube-ipvs0")
	}
	for _, at := range []string{"10.96.0.66:80", "198.51.100.7:80", "198.51.100.8:80"} {
		n.run("ipvsadm", "-A", "-t", at, "-s", "rr")
	}
	n.run("ipvsadm", "-a", "-t", "10.96.0.66:80", "-r", "10.244.1.2:8080", "-m")
	foreign := n.kernel()
	n.sync("") // mode cidr leaves it to package takeover
	n.check(n.open().Remove(context.Background()))
	n.equal(n.kernel(), foreign)

	n.options.AddressMode, n.options.Exclude = ipvs.Dummy, "198.51.100.0/24"
	n.sync(example)
	n.equal(n.addresses(), "kube-ipvs0 DOWN 10.96.0.10/32 198.51.100.7/32 203.0.113.1/32 fd00::10/128\n")
	n.check(ipvs.Driver(ipvs.Options{}).Remove(context.Background(), dataplane.Config{}))
	n.equal(blocks(n.servers()), "TCP C6336407:0050 rr\nTCP C6336408:0050 rr\n")
	n.run("ipvsadm", "-C")
	n.equal(n.kernel(), before)
}

func (n *namespace) prepare() {
	n.check(ipvs.Driver(n.options).Prepare(dataplane.Config{}))
	b, err := os.ReadFile("/proc/sys/net/ipv4/vs/conntrack")
	n.check(err)
	n.equal(string(b), "1\n")
}

func (n *namespace) closedTwice() {
	p := n.sync("")
	n.check(errors.Join(p.Close(), p.Close()))
}

// healthChecks: load balancers may ask at their own address, which is local for IPVS.
func (n *namespace) healthChecks() {
	const rows = "frontend 203.0.113.1:80/tcp any forward default/web:http local snat never\n" +
		"pool default/web:http local\nbackend default/web:http local 10.244.1.2:8080 local\n"
	const health = rows + "health 203.0.113.1:30100 default/web local 1\n"
	p := n.sync(health)
	l, err := net.Listen("tcp", "203.0.113.1:30100")
	n.check(err)
	defer l.Close()
	dial := func(want error) {
		n.Helper()
		c, err := net.Dial("tcp", l.Addr().String())
		if err == nil {
			_ = c.Close()
		}
		if !errors.Is(err, want) {
			n.Errorf("have %v, want %v", err, want)
		}
	}
	dial(nil)
	n.run("nft", "delete", "element", "ip", "fairlead-ipvs", "health-checks", "{ 203.0.113.1 . tcp . 30100 }")
	n.equal(strings.Join(n.audit(health), "\n"), "health 203.0.113.1:30100: missing: in health-checks")
	n.check(p.Sync(context.Background(), n.parse(health)))
	n.check(p.Apply(context.Background(), n.parse(rows), model.Diff(n.parse(health), n.parse(rows))))
	dial(unix.ECONNREFUSED)
}
