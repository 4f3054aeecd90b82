package migrate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"time"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/daemon"
	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/plugin/answer"
	"fairlead.dev/fairlead/plugin/ask"
)

const (
	// startPatience is how long a proxy may take to serve all Services, and to end.
	startPatience = 2 * time.Minute
	pollInterval  = 100 * time.Millisecond
	// unchanged is for how long kube-proxy's objects must be the same that count as all.
	unchanged = 2 * time.Second
)

// commands start and stop proxies. A shell runs them; they return when that is done.
type commands struct{ stop, start, agentStop, agentStart string }

// apply has Fairlead serve in the proposed mode. If that fails, or if traffic fails more than before, it goes back.
//
//	traffic before ─► kube-proxy stops ─► Fairlead starts ─┬─► in force ─► traffic after ─► done
//	                  or: Fairlead changes its mode ───────┘      │ fails       │ worse
//	kube-proxy serves ◄─ its start, healthz, clean --own ◄────────┴─────────────┘
func (m *migration) apply(ctx context.Context, s *seen) error {
	running := s.Proxy == "Fairlead"
	if running && s.Mode == s.To {
		return m.say(daemon.StepUnchanged, s.To+" is in force already")
	}
	if c := m.commands; !running && (c.stop == "" || c.start == "" || c.agentStop == "" || c.agentStart == "") {
		return cli.Misused(errors.New("no Fairlead runs here: name --stop, --start, --agent-start and --agent-stop"))
	}
	before, err := m.before(ctx, s)
	if err != nil {
		return cli.Failed(err)
	}
	forward, back := m.replace, m.goBack
	if running {
		forward = func(ctx context.Context, s *seen) error { return m.switchTo(ctx, s.To) }
		back = func(ctx context.Context, s *seen) error { return m.switchTo(ctx, s.Mode) }
	}
	if err = forward(ctx, s); err == nil {
		err = m.compare(ctx, before)
	}
	if err == nil {
		return m.say(daemon.StepDone, "done: Fairlead serves in mode "+s.To)
	}
	err = errors.Join(err, m.say(daemon.StepFailed, fmt.Sprintf("going back: %v", err)))
	if failure := back(context.WithoutCancel(ctx), s); failure != nil {
		return cli.Failed(errors.Join(err, fmt.Errorf("going back failed, too: %w", failure)))
	}
	return cli.Failed(fmt.Errorf("it is as it was before: %w", err))
}

// replace has Fairlead take kube-proxy's place, whose rules serve meanwhile.
func (m *migration) replace(ctx context.Context, s *seen) error {
	if err := m.shell(ctx, m.commands.stop); err != nil {
		return err
	}
	if err := m.shell(ctx, m.commands.agentStart); err != nil {
		return err
	}
	var status answer.Status
	err := m.await(ctx, "Fairlead serves", func() (err error) {
		if err = m.Get(ctx, "/status", &status.Report); err == nil && (status.InForceSince.IsZero() || !status.Healthy) {
			err = errors.New(status.Health())
		}
		return err
	})
	if err == nil && status.Plane != s.To {
		err = m.switchTo(ctx, s.To)
	}
	return err
}

// back undoes what apply has done.
func (m *migration) back(ctx context.Context, s *seen) error {
	undo := m.goBack
	switch running := s.Proxy == "Fairlead"; {
	case m.commands.start == "" && running && s.configured != "auto":
		undo = func(ctx context.Context, s *seen) error { return m.switchTo(ctx, s.configured) }
	case m.commands.start == "" || m.commands.agentStop == "" && running:
		return cli.Misused(errors.New("name --start and --agent-stop; Fairlead has no mode of its own to go back to"))
	}
	before, err := m.before(ctx, s)
	if err == nil {
		err = undo(ctx, s)
	}
	if err == nil {
		err = m.compare(ctx, before)
	}
	if err != nil {
		return cli.Failed(err)
	}
	return m.say(daemon.StepDone, "done: what served before serves again")
}

// goBack has kube-proxy take Fairlead's place, whose rules serve meanwhile.
func (m *migration) goBack(ctx context.Context, s *seen) error {
	var status answer.Status
	if m.Get(ctx, "/status", &status.Report) == nil && status.Plane == "ebpf" {
		// Its programs decide before rules of kube-proxy do.
		if err := m.switchTo(ctx, "nftables"); err != nil {
			return err
		}
	}
	err := m.shell(ctx, m.commands.agentStop) // which may fail as Fairlead does not run
	if still := m.await(ctx, "Fairlead has ended", daemon.Alone); still != nil {
		return errors.Join(err, still)
	}
	own, _, err := leftovers(ctx) // of Fairlead's in mode iptables, which have the same names
	if err == nil {
		err = m.shell(ctx, m.commands.start)
	}
	if err != nil {
		return err
	}
	last, since := own, time.Now() // it makes the rules of one address family after the other
	err = m.await(ctx, "kube-proxy serves", func() error {
		now, _, err := leftovers(ctx)
		if now != last {
			last, since = now, time.Now()
		}
		if err == nil && (now == own || time.Since(since) < unchanged) {
			err = errors.New("it has not made all of its rules")
		}
		return errors.Join(err, serves(ctx, s.config))
	})
	if err != nil {
		return err
	}
	return daemon.CleanOwn(ctx, os.Stderr)
}

// synced is a line of the metrics of a kube-proxy that has made its rules. It is healthy before that.
const synced = `(?m)^kubeproxy_sync_proxy_rules_last_timestamp_seconds\S* [1-9]`

// serves asks kube-proxy whether it does.
func serves(ctx context.Context, c *config.Config) error {
	healthz, metrics := netip.MustParseAddrPort("127.0.0.1:10256"), netip.MustParseAddrPort("127.0.0.1:10249")
	if c != nil {
		healthz, metrics = c.HealthzAddress(), c.MetricsAddress()
	}
	_, err := get(ctx, healthz, "/healthz")
	text, failure := get(ctx, metrics, "/metrics")
	if err == nil && failure == nil && text != "" && !regexp.MustCompile(synced).MatchString(text) {
		err = errors.New("it has not made its rules")
	}
	return errors.Join(err, failure)
}

// get asks a server of this node; the zero address: there is none.
func get(ctx context.Context, at netip.AddrPort, path string) (string, error) {
	if !at.IsValid() {
		return "", nil
	}
	if at.Addr().IsUnspecified() {
		at = netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), at.Port())
	}
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+at.String()+path, nil)
	if err != nil {
		return "", err
	}
	response, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(r)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = errors.New(path + ": " + response.Status)
	}
	return string(text), err
}

// await asks until there is no error.
func (m *migration) await(ctx context.Context, what string, try func() error) error {
	ctx, cancel := context.WithTimeout(ctx, startPatience)
	defer cancel()
	for {
		err := try()
		if err == nil {
			return m.say("waited", what)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting until %s: %w: %w", what, ctx.Err(), err)
		case <-time.After(pollInterval):
		}
	}
}

// shell runs a command. A process that it leaves running may keep its output.
func (m *migration) shell(ctx context.Context, command string) error {
	if command == "" {
		return nil
	}
	if err := m.say("command", command); err != nil {
		return err
	}
	c := exec.CommandContext(ctx, "/bin/sh", "-c", command)
	c.Stdout, c.Stderr = os.Stderr, os.Stderr
	if err := c.Run(); err != nil {
		return fmt.Errorf("%s: %w", command, err)
	}
	return nil
}

// switchTo has the running Fairlead serve in another mode.
func (m *migration) switchTo(ctx context.Context, plane string) error {
	steps, err := m.Order(context.WithoutCancel(ctx), http.MethodPost, "/switch?"+url.Values{"plane": {plane}}.Encode())
	if err != nil {
		return err
	}
	defer steps.Close()
	return ask.PrintLines(&m.Inspection, steps, ask.StepText)
}

// say prints what is done, in the words of "fairlead switch".
func (m *migration) say(step, message string) error {
	line := message
	if step == "command" {
		line = "$ " + message
	}
	if m.Output == "json" {
		text, err := json.Marshal(daemon.SwitchStep{Step: step, Message: message})
		if err != nil {
			return err
		}
		line = string(text)
	}
	_, err := fmt.Println(strings.ReplaceAll(line, "\n", " "))
	return err
}
