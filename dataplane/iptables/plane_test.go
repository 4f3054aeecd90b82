package iptables

import (
	"context"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// inNamespace runs f on a thread in a new network namespace, which goes with the thread.
func inNamespace(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	unsupported := make(chan error)
	go func() {
		defer close(unsupported)
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			unsupported <- err
			return
		}
		f(t)
	}()
	if err := <-unsupported; err != nil {
		t.Skipf("needs root (or unshare -rn): %v", err)
	}
}

// onBoth runs f in a namespace for each back end.
func onBoth(t *testing.T, f func(t *testing.T, b Backend)) {
	t.Helper()
	for _, b := range []Backend{Legacy, NFTables} {
		t.Run(string(b), func(t *testing.T) {
			t.Parallel()
			inNamespace(t, func(t *testing.T) { f(t, b) })
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
	return s
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
		runtime.Goexit()
	}
}

// tool runs one of iptables' programs, of the back end.
func tool(t *testing.T, b Backend, program, input string, arguments ...string) string {
	t.Helper()
	kind := "nft"
	if b == Legacy {
		kind = "legacy"
	}
	name, rest, _ := strings.Cut(program, "-")
	command := name + "-" + kind
	if rest != "" {
		command += "-" + rest
	}
	c := exec.Command(command, arguments...)
	c.Stdin = strings.NewReader(input)
	out, err := c.CombinedOutput()
	if err != nil {
		t.Errorf("%s %s: %v: %s", command, arguments, err, out)
	}
	return string(out)
}

// save is what iptables-save prints of both families, without what differs each time.
func save(t *testing.T, b Backend) string {
	t.Helper()
	var lines []string
	for _, program := range []string{"iptables-save", "ip6tables-save"} {
		for line := range strings.Lines(tool(t, b, program, "")) {
			if !strings.HasPrefix(line, "#") {
				lines = append(lines, line)
			}
		}
	}
	return strings.Join(lines, "")
}

const everything = `
frontend 10.96.0.11:80/tcp any forward default/web:http cluster snat offcluster
frontend 10.96.0.11:53/udp any forward default/web:dns cluster snat always
frontend 10.96.0.12:99/sctp any forward default/sctp: cluster snat never
frontend 192.0.2.1:30080/tcp any forward default/web:http local snat never
frontend 192.0.2.1:30080/tcp internal forward default/web:http cluster snat offcluster
frontend 127.0.0.1:30080/tcp any forward default/web:http cluster snat offcluster
frontend 203.0.113.1:80/tcp any forward default/web:http cluster snat always allow 192.0.2.8/29
frontend 203.0.113.2:80/tcp any reject default/none:http
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
pool default/sctp: cluster
backend default/sctp: cluster 10.244.1.12:99 local
guard 10.96.0.11/32 reject
guard 10.96.0.0/16 drop
pods 10.244.0.0/16
pods fd00:1::/64
pods interface cali*
pods interface eth5
`

// TestPlane_printable shows that iptables prints what is programmed, and takes it back as it is.
func TestPlane_printable(t *testing.T) {
	onBoth(t, func(t *testing.T, b Backend) {
		s := parse(t, everything)
		check(t, s.Validate())
		p := newPlane(t, Options{Backend: b}, dataplane.Config{})
		check(t, p.Sync(context.Background(), s))
		before := save(t, b)
		t.Log(before)
	})
}
