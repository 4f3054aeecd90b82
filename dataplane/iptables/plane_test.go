package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/localnet"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/internal/xt"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed/nstest"
	"fairlead.dev/fairlead/model"
)

// onBoth runs f in a namespace for each back end.
func onBoth(t *testing.T, f func(t *testing.T, b Backend)) {
	t.Helper()
	for _, b := range []Backend{Legacy, NFTables} {
		t.Run(string(b), func(t *testing.T) {
			t.Parallel()
			nstest.Run(t, func(t *testing.T) { f(t, b) })
		})
	}
}

func newPlane(t *testing.T, o Options, c dataplane.Config) *Plane {
	t.Helper()
	p, err := New(o)(c)
	check(t, err)
	return p.(*Plane)
}

func parse(t *testing.T, text string) *model.State {
	t.Helper()
	s, err := model.ParseState(text)
	check(t, err)
	check(t, s.Validate())
	return s
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
		runtime.Goexit()
	}
}

// tool runs one of iptables' programs, of the back end.
func tool(t *testing.T, b Backend, program, input string, arguments ...string) string {
	t.Helper()
	kind := map[Backend]string{Legacy: "-legacy", NFTables: "-nft"}[b]
	name, rest, found := strings.Cut(program, "-")
	if name += kind; found {
		name += "-" + rest
	}
	c := exec.Command(name, arguments...)
	c.Stdin = strings.NewReader(input)
	out, err := c.CombinedOutput()
	if err != nil {
		t.Errorf("%s %s: %v: %s", name, arguments, err, out)
	}
	return string(out)
}

// save is what iptables-save prints of both families, without what differs each time.
func save(t *testing.T, b Backend, arguments ...string) string {
	t.Helper()
	var lines []string
	for _, program := range []string{"iptables-save", "ip6tables-save"} {
		for line := range strings.Lines(tool(t, b, program, "", arguments...)) {
			if !strings.HasPrefix(line, "#") {
				lines = append(lines, line)
			}
		}
	}
	return strings.Join(lines, "")
}

// audit is what a plane that knows nothing yet finds different.
func audit(t *testing.T, b Backend, s *model.State) []dataplane.Drift {
	t.Helper()
	p := newPlane(t, Options{Backend: b}, dataplane.Config{})
	report, err := p.Audit(context.Background(), s, dataplane.Quick)
	check(t, errors.Join(err, p.Close()))
	return report.Drifts
}

const everything = `
frontend 10.96.0.11:80/tcp any forward default/web:http cluster snat offcluster
frontend 10.96.0.11:53/udp any forward default/web:dns cluster snat always
frontend 192.0.2.1:30080/tcp any forward default/web:http local snat never
frontend 192.0.2.1:30080/tcp internal forward default/web:http cluster snat offcluster
frontend 127.0.0.1:30080/tcp any forward default/web:http cluster snat offcluster
frontend 203.0.113.1:80/tcp any forward default/web:http cluster snat always allow 192.0.2.8/29
frontend 203.0.113.2:80/tcp any reject default/none:http
frontend 203.0.113.2:81/tcp any reject default/none:some allow 192.0.2.8/29
frontend 203.0.113.3:80/tcp any drop default/none:http
frontend [fd00::11]:80/tcp any forward default/web:http cluster6 snat offcluster
pool default/web:http cluster affinity 10m0s
backend default/web:http cluster 10.244.1.11:8080 local
backend default/web:http cluster 10.244.2.13:8080
pool default/web:http cluster6
backend default/web:http cluster6 [fd00:1::11]:8080 local
backend default/web:http cluster6 [fd00:1::12]:8080 weight 3
pool default/web:http local
backend default/web:http local 10.244.1.11:8080 local
pool default/web:dns cluster
backend default/web:dns cluster 10.244.1.12:5353 local
guard 10.96.0.11/32 reject
guard 10.96.0.0/16 drop
guard fd00::/108 drop
pods 10.244.0.0/16
pods fd00:1::/64
pods interface cali*
pods interface eth5
`

// others is what others have in the tables, with what is peculiar about rules and their counters.
const others = `*filter
:FORWARD DROP [7:700]
:ZED - [0:0]
:AUDIT - [0:0]
-A INPUT -i lo -j ACCEPT
[3:300] -A FORWARD -s 192.0.2.0/24 ! -d 198.51.100.0/24 -m comment --comment "like KUBE-" -j ZED
-A AUDIT
[5:500] -A ZED -m limit --limit 5/min -j AUDIT
-A ZED -p tcp -m multiport --dports 1,2,3 -g AUDIT
COMMIT
*nat
:CNI-SETMARK - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -m comment --comment "mine" -j CNI-SETMARK
[1:2] -A CNI-SETMARK -p tcp -j DNAT --to-destination 10.9.9.9:9
COMMIT
`

// kubeProxy is some of what kube-proxy leaves behind, under names that we use too.
const kubeProxy = `*nat
:KUBE-SERVICES - [0:0]
:KUBE-SVC-W3PUE36WFRY3BCNB - [0:0]
:KUBE-SEP-AAAAAAAAAAAAAAAA - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-SERVICES -d 10.96.0.11/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-W3PUE36WFRY3BCNB
-A KUBE-SVC-W3PUE36WFRY3BCNB -j KUBE-SEP-AAAAAAAAAAAAAAAA
-A KUBE-SEP-AAAAAAAAAAAAAAAA -p tcp -j DNAT --to-destination 10.244.9.9:80
COMMIT
`

// foreign is what iptables-save prints of others, with counters.
func foreign(t *testing.T, b Backend) string {
	t.Helper()
	var kept []string
	for line := range strings.Lines(tool(t, b, "iptables-save", "", "--counters")) {
		ours := slices.ContainsFunc(strings.Fields(strings.TrimLeft(line, ":")), owned)
		if !strings.HasPrefix(line, "#") && !ours {
			kept = append(kept, line)
		}
	}
	return strings.Join(kept, "")
}

// TestPlane_others shows that what belongs to others stays as it is, whatever we do, counters included, and
// that iptables prints and takes back what we program.
func TestPlane_others(t *testing.T) {
	onBoth(t, func(t *testing.T, b Backend) {
		tool(t, b, "iptables-restore", others, "--counters")
		tool(t, b, "iptables-restore", kubeProxy, "--noflush")
		withLeftovers := foreign(t, b)
		s := parse(t, everything)
		p := newPlane(t, Options{Backend: b}, dataplane.Config{})
		check(t, p.Sync(context.Background(), s))
		full := save(t, b)
		if got := foreign(t, b); got != withLeftovers {
			t.Errorf("after Sync others have\n%s\nnot\n%s", got, withLeftovers)
		}
		if strings.Contains(full, "KUBE-NODEPORTS") || strings.Contains(full, "10.244.9.9") {
			t.Errorf("leftovers of kube-proxy stayed:\n%s", full)
		}
		if drifts := audit(t, b, s); len(drifts) > 0 {
			t.Errorf("drifts after Sync: %v", drifts)
		}
		for _, text := range []string{"", everything, ""} {
			next := parse(t, text)
			check(t, p.Apply(context.Background(), next, model.Diff(s, next)))
			s = next
			if drifts := audit(t, b, s); len(drifts) > 0 {
				t.Errorf("drifts after Apply: %v", drifts)
			}
			if got := foreign(t, b); got != withLeftovers {
				t.Errorf("after Apply others have\n%s\nnot\n%s", got, withLeftovers)
			}
		}
		check(t, p.Remove(context.Background()))
		check(t, p.Close())
		if got := foreign(t, b); got != withLeftovers {
			t.Errorf("after Remove others have\n%s\nnot\n%s", got, withLeftovers)
		}
		if left := strings.ReplaceAll(save(t, b), "KUBE-KUBELET-CANARY", ""); strings.Contains(left, ":KUBE-") {
			t.Errorf("Remove left\n%s", left)
		}
	})
}

// similar are CRI-O's hostPorts, and an administrator's use of a chain that kube-proxy makes, too.
const similar = `*nat
:KUBE-HOSTPORTS - [0:0]
:KUBE-HP-NPX46M4PTMTKRN6Y - [0:0]
:KUBE-MARK-MASQ - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j KUBE-HOSTPORTS
-A PREROUTING -i eth7 -j KUBE-MARK-MASQ
-A KUBE-HOSTPORTS -p tcp -m tcp --dport 8080 -j KUBE-HP-NPX46M4PTMTKRN6Y
-A KUBE-HP-NPX46M4PTMTKRN6Y -p tcp -j DNAT --to-destination :8081
COMMIT
`

// TestPlane_similar has others use names that begin as ours, and KUBE-MARK-MASQ. Hairpins are so many that they make
// a tree, whose chains go with the rest.
func TestPlane_similar(t *testing.T) {
	onBoth(t, func(t *testing.T, b Backend) {
		families := map[string]string{"iptables": "10.244.1.%d", "ip6tables": "fd00:1::%d"}
		text := "pool default/many: cluster\npool default/many: cluster6\n" +
			"frontend 10.96.0.9:80/tcp any forward default/many: cluster snat never\n" +
			"frontend [fd00::9]:80/tcp any forward default/many: cluster6 snat never\n"
		for i := range 40 {
			text += fmt.Sprintf("backend default/many: cluster 10.244.1.%d:80 local\n", i) +
				fmt.Sprintf("backend default/many: cluster6 [fd00:1::%d]:80 local\n", i)
		}
		intact := func(when string) {
			for program := range families {
				saved := tool(t, b, program+"-save", "")
				for line := range strings.Lines(similar) {
					if strings.HasPrefix(line, "-A") && !strings.Contains(saved, line) {
						t.Errorf("%s %s lacks %s", when, program, line)
					}
				}
			}
		}
		for program := range families {
			tool(t, b, program+"-restore", similar)
		}
		intact("from the start")
		left, err := inspect()
		check(t, err)
		if left.Rules {
			t.Error("what others have is taken for ours")
		}
		p, s := newPlane(t, Options{Backend: b}, dataplane.Config{}), parse(t, text)
		check(t, p.Sync(context.Background(), s))
		intact("after Sync")
		for program, address := range families {
			if saved := tool(t, b, program+"-save", ""); strings.Count(saved, ":KUBE-HP-") < 3 ||
				!strings.Contains(saved, "-s "+fmt.Sprintf(address, 7)+"/") {
				t.Errorf("%s has no tree of hairpins:\n%s", program, saved)
			}
		}
		if drifts := audit(t, b, s); len(drifts) > 0 {
			t.Errorf("drifts: %v", drifts)
		}
		check(t, errors.Join(p.Remove(context.Background()), p.Close()))
		intact("after Remove")
		if n := strings.Count(save(t, b), ":KUBE-"); n != 6 {
			t.Errorf("Remove leaves %d chains, want the 6 that others use:\n%s", n, save(t, b))
		}
	})
}

// TestPlane_restorable shows that iptables-restore takes what iptables-save prints.
func TestPlane_restorable(t *testing.T) {
	onBoth(t, func(t *testing.T, b Backend) {
		s := parse(t, everything)
		p := newPlane(t, Options{Backend: b}, dataplane.Config{})
		check(t, p.Sync(context.Background(), s))
		before := tool(t, b, "iptables-save", "")
		before6 := tool(t, b, "ip6tables-save", "")
		tool(t, b, "iptables-restore", before)
		tool(t, b, "ip6tables-restore", before6)
		after := tool(t, b, "iptables-save", "")
		same := func(a, b string) bool {
			strip := func(s string) (lines []string) {
				for l := range strings.Lines(s) {
					if !strings.HasPrefix(l, "#") {
						lines = append(lines, l)
					}
				}
				return lines
			}
			return strings.Join(strip(a), "") == strings.Join(strip(b), "")
		}
		if !same(before, after) {
			t.Errorf("restored it is\n%s\nnot\n%s", after, before)
		}
		check(t, p.Sync(context.Background(), s)) // whatever that did
		if drifts := audit(t, b, s); len(drifts) > 0 {
			t.Errorf("drifts: %v", drifts)
		}
		check(t, errors.Join(p.Remove(context.Background()), p.Close()))
	})
}

// TestPlane_disturbed lets others destroy what there is, in many ways.
func TestPlane_disturbed(t *testing.T) {
	ways := map[string]func(t *testing.T, b Backend){
		"nat flushed":  func(t *testing.T, b Backend) { tool(t, b, "iptables", "", "-t", "nat", "-F") },
		"rule deleted": func(t *testing.T, b Backend) { tool(t, b, "iptables", "", "-t", "nat", "-D", "KUBE-HAIRPIN", "1") },
		"rule added": func(t *testing.T, b Backend) {
			tool(t, b, "iptables", "", "-t", "nat", "-A", "KUBE-HAIRPIN", "-j", "RETURN")
		},
		"rule replaced": func(t *testing.T, b Backend) {
			tool(t, b, "iptables", "", "-t", "nat", "-R", "KUBE-HAIRPIN", "1", "-s", "1.2.3.4", "-d", "1.2.3.4", "-j", "RETURN")
		},
		"jump deleted": func(t *testing.T, b Backend) { tool(t, b, "iptables", "", "-t", "filter", "-D", "FORWARD", "1") },
		"jump twice": func(t *testing.T, b Backend) {
			tool(t, b, "iptables", "", "-t", "nat", "-A", "PREROUTING", "-j", "KUBE-SERVICES")
		},
		"v6 chain added":  func(t *testing.T, b Backend) { tool(t, b, "ip6tables", "", "-t", "nat", "-N", "KUBE-SVC-X") },
		"all of it saved": func(t *testing.T, b Backend) { tool(t, b, "iptables-restore", tool(t, b, "iptables-save", "")) },
	}
	for name, disturb := range ways {
		t.Run(name, func(t *testing.T) {
			onBoth(t, func(t *testing.T, b Backend) {
				s := parse(t, everything)
				p := newPlane(t, Options{Backend: b}, dataplane.Config{})
				check(t, p.Sync(context.Background(), s))
				before := save(t, b)
				disturb(t, b)
				report, err := p.Audit(context.Background(), s, dataplane.Quick)
				check(t, err)
				if len(report.Drifts) == 0 && name != "all of it saved" {
					t.Error("Audit finds nothing")
				}
				check(t, p.Sync(context.Background(), s))
				if after := save(t, b); after != before {
					t.Errorf("repaired to\n%s\nfrom\n%s", after, before)
				}
				report, err = p.Audit(context.Background(), s, dataplane.Quick)
				check(t, err)
				if len(report.Drifts) > 0 {
					t.Errorf("after Sync: %v", report.Drifts)
				}
				check(t, errors.Join(p.Remove(context.Background()), p.Close()))
			})
		})
	}
}

// TestPlane_between shows that a change does not overwrite what others have changed since.
func TestPlane_between(t *testing.T) {
	onBoth(t, func(t *testing.T, b Backend) {
		tool(t, b, "iptables-restore", others)
		s := parse(t, everything)
		p := newPlane(t, Options{Backend: b}, dataplane.Config{})
		check(t, p.Sync(context.Background(), s))
		for range 3 {
			tool(t, b, "iptables", "", "-t", "nat", "-R", "CNI-SETMARK", "1", "-p", "tcp", "-j", "DNAT", "--to-destination", "10.9.9.8:8")
			tool(t, b, "iptables", "", "-t", "nat", "-A", "CNI-SETMARK", "-j", "RETURN")
			next := parse(t, strings.Replace(everything, "10.244.2.13", "10.244.2.14", 1))
			check(t, p.Apply(context.Background(), next, model.Diff(s, next)))
			saved := save(t, b)
			if !strings.Contains(saved, "10.9.9.8:8") || !strings.Contains(saved, "-A CNI-SETMARK -j RETURN") {
				t.Errorf("the change of another program is gone:\n%s", saved)
			}
			check(t, p.Apply(context.Background(), s, model.Diff(next, s)))
		}
		check(t, errors.Join(p.Remove(context.Background()), p.Close()))
	})
}

// TestPlane_refused has one row that the kernel does not take, because a set has the wrong type.
func TestPlane_refused(t *testing.T) {
	onBoth(t, func(t *testing.T, b Backend) {
		s := parse(t, everything)
		p := newPlane(t, Options{Backend: b}, dataplane.Config{})
		check(t, p.Sync(context.Background(), s))
		bad := (&chooser{id: entry{pool: model.PoolID{Service: "default/bad:"}, protocol: model.TCP}.id()}).setName(
			parse(t, badRows).Pools[model.PoolID{Service: "default/bad:"}].Backends[0])
		if out, err := exec.Command("ipset", "create", bad, "list:set").CombinedOutput(); err != nil {
			t.Errorf("ipset: %v: %s", err, out)
		}
		next := parse(t, everything+badRows)
		err := p.Apply(context.Background(), next, model.Diff(s, next))
		if !errors.Is(err, dataplane.ErrPartial) || !strings.Contains(err.Error(), "default/bad:") {
			t.Errorf("want ErrPartial that names default/bad:, got %v", err)
		}
		if !strings.Contains(save(t, b), "10.244.7.7:7") {
			t.Error("the other new row is not in force")
		}
		check(t, errors.Join(p.Remove(context.Background()), p.Close()))
	})
}

const badRows = `
frontend 10.96.0.13:80/tcp any forward default/bad: cluster snat never
pool default/bad: cluster affinity 10m0s
backend default/bad: cluster 10.244.7.6:6
frontend 10.96.0.14:80/tcp any forward default/good: cluster snat never
pool default/good: cluster
backend default/good: cluster 10.244.7.7:7
`

// TestPlane_lock shows that the lock of x_tables is waited for, and that this is told.
func TestPlane_lock(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		ctx, cancel := eventually.Context(context.Background())
		defer cancel()
		log := &sayer{text: "waiting for another program", said: cancel}
		p := newPlane(t, Options{Backend: Legacy}, dataplane.Config{Log: slog.New(slog.NewTextHandler(log, nil))})
		f, err := os.OpenFile(xt.LockFile, os.O_RDONLY|os.O_CREATE, 0o600)
		check(t, err)
		defer f.Close()
		check(t, unix.Flock(int(f.Fd()), unix.LOCK_EX))
		if err := p.Sync(ctx, model.NewState()); !errors.Is(err, context.Canceled) {
			t.Errorf("want the end of the context, got %v", err)
		}
		if !strings.Contains(log.String(), log.text) {
			t.Errorf("the log says only %q", log)
		}
		time.AfterFunc(50*time.Millisecond, func() { _ = f.Close() })
		check(t, p.Sync(context.Background(), model.NewState()))
		check(t, errors.Join(p.Remove(context.Background()), p.Close()))
	})
}

// sayer is a log that calls a function when it says something.
type sayer struct {
	bytes.Buffer
	text string
	said func()
}

func (s *sayer) Write(line []byte) (int, error) {
	if bytes.Contains(line, []byte(s.text)) {
		s.said()
	}
	return s.Buffer.Write(line)
}

// TestDetect looks where kubelet has put its hint.
func TestDetect(t *testing.T) {
	onBoth(t, func(t *testing.T, b Backend) {
		tool(t, b, "iptables", "", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT")
		got, err := Detect()
		check(t, err)
		if got != b {
			t.Errorf("Detect says %s, want %s", got, b)
		}
	})
	dir := t.TempDir()
	check(t, os.WriteFile(filepath.Join(dir, "xtables-legacy-multi"), nil, 0o700))
	check(t, os.Symlink("xtables-legacy-multi", filepath.Join(dir, "iptables")))
	if got := installed([]string{t.TempDir(), dir}); got != Legacy {
		t.Errorf("installed: %q", got)
	}
}

// TestPrepare shows that the sysctl is set for a later process, with the rules that belong to it, and put back.
func TestPrepare(t *testing.T) {
	onBoth(t, func(t *testing.T, b Backend) {
		value := func() string {
			v, err := os.ReadFile("/proc/thread-self/root" + localnet.File)
			check(t, err)
			return strings.TrimSpace(string(v))
		}
		check(t, prepare(Options{Backend: b})(dataplane.Config{}))
		if value() != "1" || !strings.Contains(save(t, b), "127.0.0.0/8") {
			t.Errorf("the sysctl is %s, and the rules are\n%s", value(), save(t, b))
		}
		check(t, prepare(Options{Backend: b})(dataplane.Config{}))
		s := parse(t, everything)
		p := newPlane(t, Options{Backend: b}, dataplane.Config{})
		check(t, p.Sync(context.Background(), s))
		if drifts := audit(t, b, s); len(drifts) > 0 {
			t.Errorf("drifts: %v", drifts)
		}
		check(t, errors.Join(p.Remove(context.Background()), p.Close()))
		if value() != "0" {
			t.Error("Remove did not put the sysctl back")
		}
	})
}

// TestPlane_sameLength has another program replace a rule by one that is as long, which shows in no size.
func TestPlane_sameLength(t *testing.T) {
	onBoth(t, func(t *testing.T, b Backend) {
		s := parse(t, everything)
		p := newPlane(t, Options{Backend: b}, dataplane.Config{})
		check(t, p.Sync(context.Background(), s))
		tool(t, b, "iptables", "", "-t", "nat", "-R", "KUBE-HAIRPIN", "1", "-s", "10.244.1.11", "-d", "10.244.1.99", "-j",
			"MASQUERADE", "--random-fully")
		found := 0
		for range maxQuickLooks {
			report, err := p.Audit(context.Background(), s, dataplane.Quick)
			check(t, err)
			found += len(report.Drifts)
		}
		if found == 0 {
			t.Error("nobody noticed")
		}
		check(t, errors.Join(p.Remove(context.Background()), p.Close()))
	})
}

// TestPlane_sorted has another program add chains whose names come after ours: iptables-legacy, which sorts all chains,
// then leaves them behind ours.
func TestPlane_sorted(t *testing.T) {
	const behind = `*nat
:cali-A - [0:0]
:cali-B - [0:0]
[5:500] -A cali-A -j RETURN
[6:600] -A cali-B -j cali-A
COMMIT
`
	onBoth(t, func(t *testing.T, b Backend) {
		s, next := parse(t, everything), parse(t, "")
		p := newPlane(t, Options{Backend: b}, dataplane.Config{})
		check(t, p.Sync(context.Background(), s))
		for range 3 {
			tool(t, b, "iptables-restore", behind, "--counters", "--noflush")
			want := foreign(t, b)
			report, err := p.Audit(context.Background(), s, dataplane.Quick)
			check(t, err)
			if len(report.Drifts) > 0 {
				t.Errorf("drifts: %v", report.Drifts)
			}
			if ok, err := p.backend.undisturbed(tablesOf(p.v6...)); !ok || err != nil {
				t.Errorf("what others have added is not known after an audit: %v", err)
			}
			check(t, p.Apply(context.Background(), next, model.Diff(s, next)))
			if got := foreign(t, b); got != want {
				t.Errorf("after Apply others have\n%s\nnot\n%s", got, want)
			}
			if drifts := audit(t, b, next); len(drifts) > 0 {
				t.Errorf("drifts after Apply: %v", drifts)
			}
			s, next = next, s
		}
		check(t, errors.Join(p.Remove(context.Background()), p.Close()))
	})
}

// A kernel that lacks a match of one rule refuses that rule, and not the others.
func TestNFT_withoutMatch(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		p := newPlane(t, Options{Backend: NFTables}, dataplane.Config{})
		check(t, p.Sync(context.Background(), parse(t, everything)))
		n := p.backend.backend.(*nfTables)
		w := n.writer(&nft.Transaction{}, newChange(tableID{name: "nat"}))
		w.Object(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE, unix.NFTA_RULE_CHAIN, chainPost)
		e := w.Tx.Open(unix.NFTA_RULE_EXPRESSIONS)
		w.extension("match", extension{name: "not in any kernel"})
		w.Tx.Close(e)
		w.Tx.End()
		if err := n.commit(w.Tx); !refused(err) || !strings.Contains(err.Error(), chainPost) {
			t.Errorf("want the rule refused, got %v", err)
		}
		check(t, errors.Join(p.Remove(context.Background()), p.Close()))
	})
}

// TestPlane_health: load balancers may ask where INPUT drops what no rule lets in.
func TestPlane_health(t *testing.T) {
	onBoth(t, func(t *testing.T, b Backend) {
		s := parse(t, everything+"health 127.0.0.1:30100 default/web local 1\nhealth [::1]:30100 default/web local 1\n")
		none := parse(t, everything)
		check(t, exec.Command("ip", "link", "set", "lo", "up").Run())
		for _, program := range []string{"iptables", "ip6tables"} {
			tool(t, b, program, "", "-A", "INPUT", "-m", "conntrack", "--ctstate", "ESTABLISHED", "-j", "ACCEPT")
			tool(t, b, program, "", "-A", "INPUT", "-p", "tcp", "--dport", "30100", "-j", "REJECT")
		}
		p := newPlane(t, Options{Backend: b}, dataplane.Config{})
		check(t, p.Sync(context.Background(), s))
		for _, at := range []string{"127.0.0.1:30100", "[::1]:30100"} {
			l, err := net.Listen("tcp", at)
			check(t, err)
			c, err := net.Dial("tcp", at)
			check(t, err)
			check(t, errors.Join(c.Close(), l.Close()))
		}
		check(t, p.Apply(context.Background(), none, model.Diff(s, none)))
		if rules := tool(t, b, "iptables-save", ""); strings.Contains(rules, "-A "+chainHealth) {
			t.Error(rules)
		}
		check(t, errors.Join(p.Remove(context.Background()), p.Close()))
	})
}

// An ipset that another program's rule needs cannot go. That keeps nothing else from being programmed.
func TestPlane_setInUse(t *testing.T) {
	onBoth(t, func(t *testing.T, b Backend) {
		s, next := parse(t, everything), parse(t, "")
		p := newPlane(t, Options{Backend: b}, dataplane.Config{})
		check(t, p.Sync(context.Background(), s))
		var set string
		for name, use := range p.families[0].sets {
			if use.backend.Port() == 8080 {
				set = name
			}
		}
		tool(t, b, "iptables", "", "-A", "INPUT", "-m", "set", "--match-set", set, "src", "-j", "ACCEPT")
		err := p.Apply(context.Background(), next, model.Diff(s, next))
		if !errors.Is(err, dataplane.ErrPartial) || !strings.Contains(err.Error(), set) {
			t.Errorf("want ErrPartial that names %s, got %v", set, err)
		}
		if err := p.Sync(context.Background(), next); !errors.Is(err, dataplane.ErrPartial) {
			t.Errorf("want ErrPartial, got %v", err)
		}
		check(t, p.Apply(context.Background(), s, model.Diff(next, s)))
		if drifts := audit(t, b, s); len(drifts) > 0 {
			t.Errorf("drifts: %v", drifts)
		}
		tool(t, b, "iptables", "", "-F", "INPUT")
		check(t, errors.Join(p.Remove(context.Background()), p.Close()))
	})
}

// TestPlane_noMemory: that there is none for a table is no reason to look for the chain that is to blame.
func TestPlane_noMemory(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		p := newPlane(t, Options{Backend: Legacy}, dataplane.Config{})
		s := parse(t, everything)
		check(t, p.Sync(context.Background(), model.NewState()))
		replaceAnswers(t, unix.ENOMEM)
		err := p.Apply(context.Background(), s, model.Diff(model.NewState(), s))
		if !errors.Is(err, unix.ENOMEM) || errors.Is(err, dataplane.ErrPartial) || strings.Contains(err.Error(), "refuses") {
			t.Errorf("want one error about memory, got %v", err)
		}
		check(t, p.Close())
	})
}

// replaceAnswers lets the thread's kernel refuse to replace tables of x_tables.
func replaceAnswers(t *testing.T, errno syscall.Errno) {
	t.Helper()
	const (
		load, equal, answer = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, unix.BPF_RET | unix.BPF_K
		number, option      = 0, 32 // struct seccomp_data: the call, and the lower half of its third argument
		setReplace          = 64    // IPT_SO_SET_REPLACE
	)
	filter := []unix.SockFilter{
		{Code: load, K: number},
		{Code: equal, K: unix.SYS_SETSOCKOPT, Jf: 3},
		{Code: load, K: option},
		{Code: equal, K: setReplace, Jf: 1},
		{Code: answer, K: unix.SECCOMP_RET_ERRNO | uint32(errno)},
		{Code: answer, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	check(t, unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
	check(t, unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&program)), 0, 0))
}
