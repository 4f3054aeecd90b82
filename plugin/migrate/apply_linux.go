package migrate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

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

// apply has Fairlead serve in the proposed mode. If that fails, or if traffic fails more than before, it goes back.
//
//	traffic before ─► kube-proxy stops ─► Fairlead starts ─┬─► in force ─► traffic after ─► done
//	                  or: Fairlead changes its mode ───────┘      │ fails       │ worse
//	kube-proxy serves ◄─ its start, healthz, clean --own ◄────────┴─────────────┘
func (m *migration) apply(ctx context.Context) error {
	s, forward, back := m.seen, m.replace, m.goBack
	switch running := s.Proxy == "Fairlead"; {
	case running && s.Mode == s.To:
		return m.say(daemon.StepUnchanged, s.To+" is in force already")
	case running:
		forward, back = m.switchTo(s.To), m.switchTo(s.Mode)
	case m.stop == "" || m.start == "" || m.agentStop == "" || m.agentStart == "":
		return cli.Misused(errors.New("no Fairlead runs here: name --stop, --start, --agent-start and --agent-stop"))
	}
	return m.attempt(ctx, forward, back, "done: Fairlead serves in mode "+s.To)
}

// back undoes what apply has done.
func (m *migration) back(ctx context.Context) error {
	s, undo := m.seen, m.goBack
	switch running := s.Proxy == "Fairlead"; {
	case m.start == "" && running && s.configured != "auto":
		undo = m.switchTo(s.configured)
	case m.start == "" || m.agentStop == "" && running:
		return cli.Misused(errors.New("name --start and --agent-stop; Fairlead has no mode of its own to go back to"))
	}
	return m.attempt(ctx, undo, nil, "done: what served before serves again")
}

// attempt does a step between two measurements. If it fails, or connections fare worse then, it goes back, unless back
// is nil.
func (m *migration) attempt(ctx context.Context, do, back func(context.Context) error, done string) error {
	addresses, err := m.addresses(ctx)
	var before sample
	if err == nil {
		before, err = m.measure(ctx, addresses)
	}
	if err != nil {
		return cli.Failed(err)
	}
	if err = do(ctx); err == nil {
		err = m.compare(ctx, before)
	}
	switch {
	case err == nil:
		return m.say(daemon.StepDone, done)
	case back == nil:
		return cli.Failed(err)
	}
	err = errors.Join(err, m.say(daemon.StepFailed, fmt.Sprintf("going back: %v", err)))
	if failure := back(context.WithoutCancel(ctx)); failure != nil {
		return cli.Failed(errors.Join(err, fmt.Errorf("going back failed, too: %w", failure)))
	}
	return cli.Failed(fmt.Errorf("it is as it was before: %w", err))
}

// replace has Fairlead take kube-proxy's place, whose rules serve meanwhile.
func (m *migration) replace(ctx context.Context) error {
	if err := m.shell(ctx, m.stop, m.agentStart); err != nil {
		return err
	}
	var status answer.Status
	err := m.await(ctx, "Fairlead serves", func() (err error) {
		if err = m.Get(ctx, "/status", &status.Report); err == nil && (status.InForceSince.IsZero() || !status.Healthy) {
			err = errors.New(status.Health())
		}
		return err
	})
	if err == nil && status.Plane != m.seen.To {
		err = m.switchTo(m.seen.To)(ctx)
	}
	return err
}

// goBack has kube-proxy take Fairlead's place, whose rules serve meanwhile.
func (m *migration) goBack(ctx context.Context) error {
	var status answer.Status
	if m.Get(ctx, "/status", &status.Report) == nil && status.Plane == "ebpf" {
		// Its programs decide before rules of kube-proxy do.
		if err := m.switchTo("nftables")(ctx); err != nil {
			return err
		}
	}
	err := m.shell(ctx, m.agentStop) // which may fail as Fairlead does not run
	if still := m.await(ctx, "Fairlead has ended", daemon.Alone); still != nil {
		return errors.Join(err, still)
	}
	own, err := leftovers(ctx) // of Fairlead's in mode iptables, which have the same names
	if err == nil {
		err = m.shell(ctx, m.start)
	}
	if err != nil {
		return err
	}
	last, since := own, time.Now() // it makes the rules of one address family after the other
	err = m.await(ctx, "kube-proxy serves", func() error {
		now, err := leftovers(ctx)
		if !slices.Equal(now, last) {
			last, since = now, time.Now()
		}
		if err == nil && (slices.Equal(now, own) || time.Since(since) < unchanged) {
			err = errors.New("it has not made all of its rules")
		}
		return errors.Join(err, serves(m.seen.config))
	})
	if err != nil {
		return err
	}
	return daemon.CleanOwn(ctx, os.Stderr)
}

// synced is a line of the metrics of a kube-proxy that has made its rules. It is healthy before that.
const synced = `(?m)^kubeproxy_sync_proxy_rules_last_timestamp_seconds\S* [1-9]`

// serves asks kube-proxy whether it does.
func serves(c *config.Config) error {
	healthz, metrics := netip.MustParseAddrPort("127.0.0.1:10256"), netip.MustParseAddrPort("127.0.0.1:10249")
	if c != nil {
		healthz, metrics = c.HealthzAddress(), c.MetricsAddress()
	}
	_, err := get(healthz, "/healthz")
	text, failure := get(metrics, "/metrics")
	if err == nil && failure == nil && text != "" && !regexp.MustCompile(synced).MatchString(text) {
		err = errors.New("it has not made its rules")
	}
	return errors.Join(err, failure)
}

// get asks a server of this node; the zero address: there is none.
func get(at netip.AddrPort, path string) (string, error) {
	if !at.IsValid() {
		return "", nil
	}
	client := http.Client{Timeout: dialTimeout, Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Get("http://" + at.String() + path)
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
	var last error
	err := wait.PollUntilContextTimeout(ctx, pollInterval, startPatience, true, func(context.Context) (bool, error) {
		last = try()
		return last == nil, nil
	})
	if err != nil {
		return fmt.Errorf("waiting until %s: %w: %w", what, err, last)
	}
	return m.say("waited", what)
}

// shell runs commands. A process that one leaves running may keep its output.
func (m *migration) shell(ctx context.Context, commands ...string) error {
	for _, command := range commands {
		if command == "" {
			continue
		}
		if err := m.say("command", command); err != nil {
			return err
		}
		c := exec.CommandContext(ctx, "/bin/sh", "-c", command)
		c.Stdout, c.Stderr = os.Stderr, os.Stderr
		if err := c.Run(); err != nil {
			return fmt.Errorf("%s: %w", command, err)
		}
	}
	return nil
}

// switchTo has the running Fairlead serve in another mode.
func (m *migration) switchTo(mode string) func(context.Context) error {
	return func(ctx context.Context) error {
		steps, err := m.Order(context.WithoutCancel(ctx), http.MethodPost, "/switch?plane="+mode)
		if err != nil {
			return err
		}
		defer steps.Close()
		return ask.PrintLines(&m.Inspection, steps, ask.StepText)
	}
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
