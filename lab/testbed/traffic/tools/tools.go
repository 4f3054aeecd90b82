// Package tools runs the programs with which others have measured service proxies, where they are installed, in places
// of a testbed: what traffic's own workers serve and ask, the same Server and Load say to them, and the Result is
// alike.
//
//	Load ───► ab, k6, iperf3 ──► text, CSV, JSON ─► Result
//	Server ─► nginx, iperf3 ───► a Daemon
//
// An error is exec.ErrNotFound where a program is not installed, and errors.ErrUnsupported where it cannot do what is
// wanted. Nothing is started but what is asked for, and all of it ends with its place and with this process.
package tools

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/traffic"
)

// The programs.
const (
	AB     = "ab"     // ApacheBench
	K6     = "k6"     // of Grafana
	IPerf3 = "iperf3" // of ESnet
	Nginx  = "nginx"
)

// Version is what an installed program says of itself.
func Version(ctx context.Context, program string) (string, error) {
	flag, ok := map[string]string{AB: "-V", K6: "version", IPerf3: "--version", Nginx: "-v"}[program]
	if !ok {
		return "", fmt.Errorf("tools: %s is not known here", program)
	}
	out, err := exec.CommandContext(ctx, program, flag).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("tools: %s %s: %w", program, flag, err)
	}
	line, _, _ := strings.Cut(string(out), "\n")
	return strings.TrimSpace(line), nil
}

// At is where programs run.
type At struct {
	Bed   *testbed.Bed
	Place testbed.Place
}

// Run has an installed program do a Load: ab and k6 such of HTTP, iperf3 one of Bulk, for which there must be an
// iperf3 as a server. It ends when ctx does.
func (a At) Run(ctx context.Context, program string, l traffic.Load) (traffic.Result, error) {
	run := map[string]func(context.Context, command, traffic.Load) (traffic.Result, error){
		AB: runAB, K6: runK6, IPerf3: runIPerf3,
	}[program]
	if run == nil {
		return traffic.Result{}, fmt.Errorf("tools: %s is no client that is known here", program)
	}
	l.Concurrency = max(l.Concurrency, 1)
	if l.Timeout == 0 {
		l.Timeout = 10 * time.Second
	}
	r, err := run(ctx, command{a, program}, l)
	if err != nil {
		return traffic.Result{}, fmt.Errorf("tools: %s in %s: %w", program, a.Place, err)
	}
	return r, nil
}

// command is a program that is to be run.
type command struct {
	At
	name string
}

// run returns what the program has printed, and what it took.
func (c command) run(ctx context.Context, args ...string) (out []byte, used traffic.Usage, err error) {
	cmd := c.Bed.Command(ctx, c.Place, c.name, args...)
	cmd.SysProcAttr.Setpgid = true // who interrupts us at the terminal leaves us the programs
	var words bytes.Buffer
	cmd.Stderr = &words
	out, err = cmd.Output()
	if s := cmd.ProcessState; s != nil {
		used.User, used.System = s.UserTime(), s.SystemTime()
		if r, ok := s.SysUsage().(*syscall.Rusage); ok {
			used.MostMemory = uint64(r.Maxrss) << 10
		}
	}
	if err != nil && ctx.Err() != nil {
		err = ctx.Err()
	}
	if err != nil && words.Len() > 0 {
		err = fmt.Errorf("%w; it said: %s", err, bytes.TrimSpace(words.Bytes()))
	}
	return out, used, err
}

// unsupported is a wish that a program cannot fulfil.
func unsupported(wish string) error {
	return fmt.Errorf("%w: it has no %s", errors.ErrUnsupported, wish)
}

// need is the first wish of some that is there and cannot be fulfilled.
func need(wishes map[string]bool) error {
	for wish, there := range wishes {
		if there {
			return unsupported(wish)
		}
	}
	return nil
}

// Daemon is a server that runs until Close, at most as long as its place.
type Daemon struct {
	cmd   *testbed.Cmd
	end   context.CancelFunc
	words chan struct{} // closed when it has said its last one
}

// Close kills the server.
func (d *Daemon) Close() error {
	d.end()
	<-d.words
	err := d.cmd.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) && !exit.Exited() {
		return nil // as it should
	}
	return fmt.Errorf("tools: %s had ended: %w", d.cmd.Path, err)
}

// Pid is the server's.
func (d *Daemon) Pid() int { return d.cmd.Process.Pid }

// start starts a server and returns when it has printed a line in which ready occurs.
func (c command) start(ctx context.Context, ready string, args ...string) (*Daemon, error) {
	ctx, end := context.WithCancel(ctx)
	d := &Daemon{cmd: c.Bed.Command(ctx, c.Place, c.name, args...), end: end, words: make(chan struct{})}
	d.cmd.SysProcAttr.Setpgid = true
	out, err := d.cmd.StderrPipe()
	if err == nil {
		d.cmd.Stdout = d.cmd.Stderr
		err = d.cmd.Start()
	}
	if err != nil {
		end()
		return nil, fmt.Errorf("tools: start %s in %s: %w", c.name, c.Place, err)
	}
	lines := bufio.NewScanner(out)
	var said strings.Builder
	for lines.Scan() {
		fmt.Fprintln(&said, lines.Text())
		if strings.Contains(lines.Text(), ready) {
			go func() {
				defer close(d.words)
				_, _ = io.Copy(io.Discard, out) // until it ends
			}()
			return d, nil
		}
	}
	end()
	return nil, fmt.Errorf("tools: %s in %s ended (%w) and said:\n%s", c.name, c.Place, d.cmd.Wait(), said.String())
}
