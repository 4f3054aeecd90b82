package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/testbed"
)

// withLab makes fairlead-lab a shell script, or takes it away if there is none.
func withLab(t *testing.T, c *testbed.Cmd, script string) *testbed.Cmd {
	t.Helper()
	dir := t.TempDir()
	if script != "" {
		open(t, dir)
		text := "#!/bin/sh\n" + script + "\n"
		if err := os.WriteFile(filepath.Join(dir, "fairlead-lab"), []byte(text), 0o755); err != nil { //nolint:gosec // a program
			t.Fatal(err)
		}
	}
	c.Env = append(c.Env, "PATH="+dir+":/usr/sbin:/usr/bin:/sbin:/bin")
	return c
}

// Without the laboratory its commands say in one sentence how to get it.
func TestLab_absent(t *testing.T) {
	w := newWorld(t)
	for _, args := range [][]string{{"demo"}, {"bench", "--list"}, {"recommend", "--output", "json"}, {"demo", "--help"}} {
		c := withLab(t, w.command(args...), "")
		out, _ := c.CombinedOutput()
		status, text := c.ProcessState.ExitCode(), string(out)
		if status != 2 || strings.Count(text, "\n") != 1 || !strings.Contains(text, "./dev build") ||
			!strings.HasPrefix(text, "fairlead: "+args[0]+" is a command of the laboratory") {
			t.Errorf("fairlead %s: exit status %d\n%s", strings.Join(args, " "), status, text)
		}
	}
}

// Arguments, environment, standard streams and the exit status are those of one process.
func TestLab_takesOver(t *testing.T) {
	w := newWorld(t)
	c := withLab(t, w.command("bench", "-o", "json", "--", "a b", ""), `printf '%s|' $$ "$0" "$@"; cat; echo problem >&2; exit 77`)
	c.Stdin = strings.NewReader("input")
	out, _ := c.Output()
	fields := strings.Split(string(out), "|")
	if c.ProcessState.ExitCode() != 77 || len(fields) < 3 ||
		!slices.Equal(fields[2:], []string{"bench", "-o", "json", "--", "a b", "", "input"}) {
		t.Errorf("exit status %d, %q", c.ProcessState.ExitCode(), fields)
	}
}

// Help and the shell learn of subcommands and flags from fairlead-lab itself.
func TestLab_helpAndCompletion(t *testing.T) {
	w := newWorld(t)
	for _, args := range [][]string{{"help", "bench", "report"}, {"help", "demo"}, {"__complete", "bench", "--re"}} {
		out, err := withLab(t, w.command(args...), `printf '%s ' "$@"`).Output()
		if want := strings.Join(args, " ") + " "; err != nil || string(out) != want {
			t.Errorf("fairlead %s runs fairlead-lab %s: %v", want, out, err)
		}
	}
}

// Mode auto does without measurements where there are none, and says so.
func TestRun_autoWithoutLab(t *testing.T) {
	for name, c := range map[string]struct{ script, says string }{
		"absent":  {"", "fairlead-lab is neither in"},
		"fails":   {"echo no memory >&2; exit 3", "exit status 3: no memory"},
		"garbage": {"echo nonsense", "invalid character"},
		"hangs":   {"exec sleep 1000", "no answer within 10s"},
		"wraps":   {"sleep 1000; :", "no answer within 10s"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			run := w.command("run", "--once", "--proxy-mode", "auto", "--conntrack-max-per-core", "0", "--manifests", w.manifests,
				"--node-ip", "192.0.2.1")
			out, err := withLab(t, run, c.script).CombinedOutput()
			text := string(out)
			if err != nil || !strings.Contains(text, c.says) || !strings.Contains(text, "nothing was measured") ||
				!strings.Contains(text, `msg="chose a data plane" plane=nftables reason="nftables, the first of nftables, iptables`) {
				t.Errorf("%v, want %q in\n%s", err, c.says, text)
			}
			w.answers()
		})
	}
}
