package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/testbed"
)

// beside are the arguments of a daemon beside another one, whose listeners it leaves alone.
func (w *world) beside(more ...string) []string {
	return append([]string{"run", "--manifests", w.manifests, "--node-ip", "192.0.2.1", "--conntrack-max-per-core=0",
		"--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0", "--control-socket", "",
		"--healthz-bind-address", "127.0.0.1:11256", "--metrics-bind-address", "127.0.0.1:11249"}, more...)
}

// within has a command run by others.
func (w *world) within(c *testbed.Cmd, inside ...string) *testbed.Cmd {
	command := slices.Concat(inside, c.Args)
	outer := w.bed.Command(context.WithoutCancel(w.Context()), testbed.Node, command[0], command[1:]...)
	outer.Env = c.Env
	return outer
}

// TestRun_second has a daemon run in a mount namespace of its own. Each other one on the node ends, names the process
// and changes nothing. One on another node runs.
func TestRun_second(t *testing.T) {
	w := newWorld(t)
	w.inside = []string{"unshare", "--mount"}
	first := w.start()
	w.inside = nil
	before := w.ruleset()
	var all sync.WaitGroup
	for _, c := range []struct {
		inside []string
		want   string
	}{
		{nil, fmt.Sprintf("process %d, in another mount namespace; each would undo the other's rules: stop that one",
			first.Process.Pid)},
		{[]string{"unshare", "--pid", "--fork", "--kill-child", "--mount-proc"}, "it is in another pid namespace, " +
			`so that its pid is not known here ("ss -xlp | grep @fairlead/`},
	} {
		all.Go(func() {
			command := w.within(w.command(w.beside()...), c.inside...)
			out, _ := command.CombinedOutput()
			if got := command.ProcessState.ExitCode(); got != 1 {
				t.Errorf("%q: exit status %d, want 1", c.inside, got)
			}
			refusal := "fairlead: another Fairlead runs in this network namespace: " + c.want
			for _, want := range []string{"waiting for its end", refusal} {
				if !strings.Contains(string(out), want) {
					t.Errorf("%q: no %q in\n%s", c.inside, want, out)
				}
			}
		})
	}
	all.Wait()
	if after := w.ruleset(); after != before {
		t.Errorf("before\n%s\nand now\n%s", before, after)
	}
	out, err := w.commandOn("node-b", w.beside("--once")...).CombinedOutput()
	if err != nil || strings.Contains(string(out), "another Fairlead") {
		t.Errorf("on another node: %v\n%s", err, out)
	}
}

// TestRun_secondFollows starts a daemon after another one was killed, and one that waits until another one ends.
func TestRun_secondFollows(t *testing.T) {
	w := newWorld(t)
	w.start().end()
	out, err := w.command(w.beside("--once")...).CombinedOutput()
	if err != nil || strings.Contains(string(out), "another Fairlead") {
		t.Errorf("after kill -9: %v\n%s", err, out)
	}
	first := w.start()
	next := w.follow(w.command(w.beside()...))
	next.await("waiting for its end")
	if err := first.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	next.await("msg=programmed")
	if err := first.Wait(); err != nil {
		t.Errorf("the first one: %v", err)
	}
}

// TestRun_secondIgnores has a daemon start beside others that may not make rules, one of them of another user. Their
// names look like those of a daemon that may.
func TestRun_secondIgnores(t *testing.T) {
	w := openWorld(t)
	user := w.follow(w.unprivileged("-all", w.beside("--proxy-mode", "userspace")...))
	user.await("msg=programmed")
	rights := []string{"setpriv", "--bounding-set=-all", "--inh-caps=-all"}
	root := w.follow(w.within(w.command(w.beside("--proxy-mode", "userspace")...), rights...))
	root.await("msg=programmed")
	p := w.start()
	w.answers()
	p.end()
	for len(p.lines) > 0 {
		if line := <-p.lines; strings.Contains(line, "another Fairlead") {
			t.Error(line)
		}
	}
}
