package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// patience is how long to wait for what takes milliseconds on an idle machine, and slowPatience on a slow one.
const patience, slowPatience = 30 * time.Second, 10 * time.Minute

// proxy is "fairlead run" on the node under test, in a process of its own, as it would run anywhere.
type proxy struct {
	*kubernetes.Proxy // the one that runs, or ran last; nil: none has been started
	bed               *testbed.Bed
	argv              []string
	log               string // file
	socket            string // where it answers questions
	patience          time.Duration
}

// newProxy makes the command line. Files, among them the manifests, are in dir.
func newProxy(bed *testbed.Bed, o Options, dir string) (*proxy, error) {
	p := &proxy{bed: bed, log: filepath.Join(dir, "proxy.log"), socket: filepath.Join(dir, "control"),
		patience: patience}
	if o.Slow {
		p.patience = slowPatience
	}
	p.argv = append(p.argv, o.Proxy...)
	if o.Mode != "" {
		p.argv = append(p.argv, "--proxy-mode", o.Mode)
	}
	p.argv = append(p.argv, "--manifests", filepath.Join(dir, manifestDir), "--hostname-override", string(testbed.Node),
		"--healthz-bind-address", "127.0.0.1:10256", "--control-socket", p.socket)
	for _, v6 := range []bool{false, true} {
		p.argv = append(p.argv, "--node-ip", bed.Addr(testbed.Node, v6).String())
	}
	p.argv = append(p.argv, "--cluster-cidr", testbed.ClusterCIDR())
	if o.Mode == socketwise && bed.Cgroup() != "" {
		pins := filepath.Join(dir, "bpf")
		if err := bed.MountBPFFS(pins); err != nil {
			return nil, err
		}
		p.argv = append(p.argv, "--cgroup-root", bed.Cgroup(), "--bpf-root", pins)
	}
	return p, nil
}

// start starts the process, which dies with ctx and with this process, and returns when the kernel holds every Service.
func (p *proxy) start(ctx context.Context) error {
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	started, err := kubernetes.StartProxy(ctx, kubernetes.ProxyOptions{Bed: p.bed, Command: p.argv, Log: log})
	if err != nil {
		return errors.Join(err, log.Close())
	}
	p.Proxy = started
	go func() {
		<-started.Ended()
		_ = log.Close()
	}()
	ctx, cancel := context.WithTimeout(ctx, p.patience)
	defer cancel()
	return p.Ready(ctx)
}

// kill ends the process as a crash would. One that has not started, or has ended, is no error.
func (p *proxy) kill() error {
	if p.Proxy == nil {
		return nil
	}
	return p.Kill()
}

// follow returns when the rows in force are as wanted.
func (p *proxy) follow(ctx context.Context, wanted func(*model.State) bool) error {
	ctx, cancel := context.WithTimeout(ctx, p.patience)
	defer cancel()
	return p.Await(ctx, "the proxy does not follow the manifests", func(ctx context.Context) (bool, error) {
		text, err := engine.Ask(ctx, p.socket, "/dump")
		if err != nil {
			return false, err
		}
		state, err := model.ParseState(string(text))
		return err == nil && wanted(state), err
	})
}

// about says what serves.
func (p *proxy) about(ctx context.Context) (r engine.About, err error) {
	answer, err := engine.Ask(ctx, p.socket, "/status")
	if err != nil {
		return r, fmt.Errorf("ask the proxy for its status: %w", err)
	}
	return r, json.Unmarshal(answer, &r)
}

// explain asks the proxy what it does with a client's packets to an address, and why.
func (p *proxy) explain(ctx context.Context, t *trial) (x service.Explanation, err error) {
	q := url.Values{"format": {"json"}, "destination": {t.To.String()}, "protocol": {t.Protocol.String()}}
	if t.from != testbed.Node {
		q.Set("source", t.source.String())
		q.Set("interface", t.iface)
	}
	answer, err := engine.Ask(ctx, p.socket, "/explain?"+q.Encode())
	if err != nil {
		return x, fmt.Errorf("ask the proxy about %s: %w", t.To, err)
	}
	return x, json.Unmarshal(answer, &x)
}

// warnings are the first lines of the log that say what is wrong.
func (p *proxy) warnings() []string {
	const most = 20
	text, err := os.ReadFile(p.log)
	if err != nil {
		return []string{err.Error()}
	}
	lines := slices.DeleteFunc(strings.Split(string(text), "\n"), func(line string) bool {
		about := strings.Contains(line, " msg=problem file=") // the manifests: the demo has said it
		return about || !strings.Contains(line, " level=WARN ") && !strings.Contains(line, " level=ERROR ")
	})
	return lines[:min(len(lines), most)]
}
