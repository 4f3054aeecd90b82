package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

const (
	// healthz is where the proxy says that it is ready, inside the node's namespace.
	healthz = "127.0.0.1:10256"
	// patience is how long to wait for what takes milliseconds on an idle machine.
	patience = 30 * time.Second
	poll     = 5 * time.Millisecond
)

// proxy is "fairlead run" on the node under test, in a process of its own, as it would run anywhere.
type proxy struct {
	bed    *testbed.Bed
	argv   []string
	log    string // file
	socket string // where it answers questions
	cmd    *testbed.Cmd
	ended  chan struct{} // closed once the process has ended
}

// newProxy makes the command line. Files, among them the manifests, are in dir.
func newProxy(bed *testbed.Bed, o Options, dir string) *proxy {
	p := &proxy{bed: bed, log: filepath.Join(dir, "proxy.log"), socket: filepath.Join(dir, "control")}
	p.argv = append(p.argv, o.Proxy...)
	if o.Mode != "" {
		p.argv = append(p.argv, "--proxy-mode", o.Mode)
	}
	p.argv = append(p.argv, "--manifests", filepath.Join(dir, manifestDir), "--hostname-override", string(testbed.Node),
		"--healthz-bind-address", healthz, "--control-socket", p.socket)
	for _, v6 := range []bool{false, true} {
		p.argv = append(p.argv, "--node-ip", bed.Addr(testbed.Node, v6).String())
	}
	cidrs := ""
	for _, c := range testbed.ClusterCIDRs() {
		cidrs += "," + c.String()
	}
	p.argv = append(p.argv, "--cluster-cidr", cidrs[1:])
	return p
}

// start starts the process, which dies with ctx and with this process, and returns when it is ready.
func (p *proxy) start(ctx context.Context) error {
	if err := p.launch(ctx); err != nil {
		return fmt.Errorf("start the proxy: %w", err)
	}
	return p.ready(ctx)
}

func (p *proxy) launch(ctx context.Context) error {
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := p.bed.Command(ctx, testbed.Node, p.argv[0], p.argv[1:]...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr.Setpgid = true // Ctrl-C reaches this process only, which knows what to do
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = cmd.Wait() // the log says why, if it was not us
	}()
	p.cmd, p.ended = cmd, ended
	return nil
}

// kill ends the process as a crash would. One that has not started, or has ended, is no error.
func (p *proxy) kill() error {
	if p.cmd == nil {
		return nil
	}
	err := p.cmd.Process.Kill()
	<-p.ended
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}

var errNotReady = errors.New("not ready")

// ready returns when /healthz says that the kernel holds every Service.
func (p *proxy) ready(ctx context.Context) error {
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return p.bed.Dial(ctx, testbed.Node, model.TCP, netip.MustParseAddrPort(healthz))
		},
	}}
	return p.await(ctx, "does not become ready", func(ctx context.Context) error {
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+healthz+"/healthz", nil)
		if err != nil {
			return err
		}
		answer, err := client.Do(r)
		if err != nil {
			return errNotReady
		}
		defer answer.Body.Close()
		if answer.StatusCode != http.StatusOK {
			return errNotReady
		}
		return nil
	})
}

// follow returns when the rows in force are as wanted.
func (p *proxy) follow(ctx context.Context, wanted func(*model.State) bool) error {
	return p.await(ctx, "does not follow the manifests", func(ctx context.Context) error {
		text, err := engine.Ask(ctx, p.socket, "/dump")
		if err != nil {
			return err
		}
		state, err := model.ParseState(string(text))
		if err == nil && !wanted(state) {
			err = errNotReady
		}
		return err
	})
}

// await tries until there is another answer than errNotReady.
func (p *proxy) await(ctx context.Context, failure string, try func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for {
		err := try(ctx)
		if !errors.Is(err, errNotReady) {
			return err
		}
		select {
		case <-tick.C:
		case <-p.ended:
			return fmt.Errorf("the proxy has ended; its last words:\n%s", p.tail())
		case <-ctx.Done():
			return fmt.Errorf("the proxy %s: %w; its last words:\n%s", failure, ctx.Err(), p.tail())
		}
	}
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

// manyLines are more than anybody wants to read.
const manyLines = 20

// tail is the end of the log.
func (p *proxy) tail() string {
	lines := p.lines()
	return strings.Join(lines[max(0, len(lines)-manyLines):], "\n")
}

// warnings are the first lines of the log that say what is wrong.
func (p *proxy) warnings() []string {
	lines := slices.DeleteFunc(p.lines(), func(line string) bool {
		return !strings.Contains(line, " level=WARN ") && !strings.Contains(line, " level=ERROR ")
	})
	return lines[:min(len(lines), manyLines)]
}

func (p *proxy) lines() []string {
	text, err := os.ReadFile(p.log)
	if err != nil {
		return []string{err.Error()}
	}
	return strings.Split(strings.TrimSpace(string(text)), "\n")
}
