package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/said"
	"fairlead.dev/fairlead/service"
)

func whyCommand() *cobra.Command {
	var q serviceQuestion
	c := &cobra.Command{
		Use:   "why [NAMESPACE/]NAME",
		Short: "say why a Service does not work here: check each step from its object to its backends",
		Long: "why checks each step between the object and its backends, and names the first that fails:\n\n" +
			"  the proxy follows the cluster\n" +
			"  the Service is served, and has endpoints under the right port names\n" +
			"  endpoints are ready, and traffic policies leave some\n" +
			"  the kernel holds the rules\n" +
			"  the backends and the ClusterIP answer from here, and the counters move\n\n" +
			"Exit status 1: a step fails.",
		Example:           "  fairlead why shop/cart",
		Args:              cobra.ExactArgs(1),
		RunE:              func(c *cobra.Command, args []string) error { return q.why(c.Context(), args[0]) },
		ValidArgsFunction: q.complete,
	}
	q.addTo(c)
	return c
}

// step is one of the checks of why.
type step struct {
	Result string `json:"result"` // ok, warning, failed or unknown
	Text   string `json:"text"`
	Do     string `json:"do,omitempty"`
}

const (
	stepOK      = "ok"
	stepWarning = "warning"
	stepFailed  = "failed"
	stepUnknown = "unknown" // it could not be tried
)

// findings are the steps up to the first that failed.
type findings struct {
	Service string `json:"service"`
	Steps   []step `json:"steps"`
}

func (f *findings) ok(format string, args ...any) {
	f.Steps = append(f.Steps, step{Result: stepOK, Text: fmt.Sprintf(format, args...)})
}

func (f *findings) warn(do, format string, args ...any) {
	f.Steps = append(f.Steps, step{stepWarning, fmt.Sprintf(format, args...), do})
}

func (f *findings) fail(do, format string, args ...any) {
	f.Steps = append(f.Steps, step{stepFailed, fmt.Sprintf(format, args...), do})
}

func (f *findings) unknown(format string, args ...any) {
	f.Steps = append(f.Steps, step{Result: stepUnknown, Text: fmt.Sprintf(format, args...)})
}

func (f *findings) failed() bool {
	return slices.ContainsFunc(f.Steps, func(s step) bool { return s.Result == stepFailed })
}

// String has the step that failed as its first line, and then all.
func (f *findings) String() string {
	var text strings.Builder
	fmt.Fprintf(&text, "%s: %s\n", f.Service, f.conclusion())
	for _, s := range f.Steps {
		fmt.Fprintf(&text, "  %-8s %s\n", s.Result, s.Text)
		if s.Do != "" {
			fmt.Fprintf(&text, "  %-8s %s\n", "", "→ "+s.Do)
		}
	}
	return text.String()
}

func (f *findings) conclusion() string {
	warnings, works := 0, "it works from here"
	for _, s := range f.Steps {
		switch s.Result {
		case stepFailed:
			return s.Text
		case stepUnknown:
			works = "its rules are in force; whether backends answer is not known"
		case stepWarning:
			warnings++
		}
	}
	if warnings > 0 {
		return said.Count(warnings, "warning") + ", else " + works
	}
	return works
}

func (q *serviceQuestion) why(ctx context.Context, name string) error {
	if err := q.Check(); err != nil {
		return err
	}
	f := &findings{Service: q.named(name).String()}
	for _, check := range []func(context.Context, *findings) error{
		q.checkProxy, q.checkService, q.checkKernel, q.checkAnswers,
	} {
		if err := check(ctx, f); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return cli.Exit(cli.ExitInterrupted, nil)
		}
		if f.failed() {
			break
		}
	}
	err := q.Print(f)
	if f.failed() {
		return errors.Join(err, cli.Exit(cli.ExitFound, nil))
	}
	return err
}

// silentWatch is after how long without a message a watch counts as stale. The API server sends a bookmark a minute.
const silentWatch = 5 * time.Minute

// checkProxy asks whether the proxy follows the cluster.
func (q *serviceQuestion) checkProxy(ctx context.Context, f *findings) error {
	r, err := q.askStatus(ctx)
	switch {
	case errors.Is(err, cli.ErrNoProxy):
		f.fail("start it, or name its --control-socket; all modes but userspace serve by their last rules", "%v", err)
		return nil
	case err != nil:
		return err
	}
	for _, w := range r.Watches {
		if age := r.Now.Sub(w.LastMessage); age > silentWatch {
			f.fail("check the way from this node to the API server; the rules are those of that time",
				"the API server has said nothing of %s for %s", w.Resource, r.age(w.LastMessage))
		}
	}
	if f.failed() {
		return nil
	}
	if r.ConfigurationRefused != "" {
		f.warn("correct the file; the configuration before it stays in force", "the configuration is refused: %s",
			strings.ReplaceAll(r.ConfigurationRefused, "\n", " "))
	}
	if r.Mode != r.Plane && r.Mode != "auto" && (r.Mode != "" || r.Plane != "iptables") {
		f.warn("fairlead help symptoms, \"another data plane serves\"", "mode %s is configured, data plane %s serves",
			r.Mode, r.Plane)
	}
	switch {
	case !r.Healthy:
		f.fail("fairlead status, and the log of the proxy", "the proxy is not healthy: %s",
			strings.TrimPrefix(r.health(), "no: "))
	case r.Failures > 0:
		f.warn("fairlead status", "the kernel has refused rows %s in a row: %s", said.Count(r.Failures, "time"), r.Error)
	default:
		f.ok("the proxy follows the cluster, by data plane %s", r.plane())
	}
	return nil
}

// checkService asks what the Service's objects say.
func (q *serviceQuestion) checkService(ctx context.Context, f *findings) error {
	namespace, name, _ := strings.Cut(f.Service, "/")
	all, err := q.one(ctx, f.Service)
	switch {
	case errors.Is(err, errUnknown):
		f.fail(fmt.Sprintf("kubectl -n %s get service %s --show-labels", namespace, name), "%v", err)
		return nil
	case err != nil:
		return err
	}
	s := all.Services[0]
	if s.Ignored != "" {
		f.fail("clients use its DNS name or its pods' addresses", "this proxy does not serve it: %s", s.Ignored)
		return nil
	}
	for _, p := range s.Problems {
		f.warn("correct the object", "%s", strings.ReplaceAll(p.Error(), "\n", " "))
	}
	if s.Slices == 0 { // the controller leaves an empty slice where no pod matches
		f.fail(fmt.Sprintf("compare: kubectl -n %s get service %s -o jsonpath={.spec.selector}; "+
			"kubectl -n %s get pods --show-labels", namespace, name, namespace),
			"it has no endpoints: its selector matches no pod, or it has no selector")
		return nil
	}
	for _, p := range s.Ports {
		checkPort(f, &s, &p)
	}
	return nil
}

// checkPort asks which endpoints a port of the Service has, and what becomes of packets to its addresses.
func checkPort(f *findings, s *engine.ServiceReport, p *service.PortSummary) {
	namespace, name, _ := strings.Cut(s.Service, "/")
	pods := fmt.Sprintf("kubectl -n %s get pods -o wide; kubectl -n %s describe endpointslices -l "+
		"kubernetes.io/service-name=%s", namespace, namespace, name)
	switch {
	case p.Unserved != "":
		f.fail("give the port the same name and protocol in both, as a container has it",
			"port %s has no endpoints: %s", portText(*p), p.Unserved)
	case p.Ready+p.Draining+p.Excluded == 0:
		f.fail(pods, "port %s has no endpoints: no pod matches the selector", portText(*p))
	case p.Ready == 0:
		f.fail(pods, "port %s has no endpoint that takes connections: %s", portText(*p), excluded(p))
	default:
		f.ok("port %s: %s", portText(*p), endpointText(*p))
	}
	for _, a := range p.Addresses {
		at := fmt.Sprintf("%s (%s)", a.At, a.Kind)
		switch {
		case a.Owner != "":
			f.warn("give one of the two another address or port",
				"%s is the address of Service %s, which came first", at, a.Owner)
		case a.Verdict == "pass":
			f.warn("see the problems of the Service", "%s is not served", at)
		case a.Verdict == "drop" && a.Kind == "ClusterIP":
			f.fail("use internalTrafficPolicy Cluster, or run a pod on this node",
				"packets to %s are dropped: internalTrafficPolicy is Local, and no endpoint on this node takes them", at)
		case a.Verdict == "drop":
			f.warn("use externalTrafficPolicy Cluster, or another node",
				"packets to %s are dropped: externalTrafficPolicy is Local, and no endpoint on this node takes them", at)
		case a.Verdict == "reject" && p.Ready > 0:
			f.warn("let the pods have addresses of both families, or the Service one family",
				"connections to %s are refused: no endpoint of its address family takes them", at)
		}
		if a.Sources > 0 {
			f.ok("only clients of %s reach %s", said.Count(a.Sources, "source range"), at)
		}
	}
}

// excluded counts the reasons why endpoints take no connections.
func excluded(p *service.PortSummary) string {
	counts := map[string]int{}
	for _, e := range p.Endpoints {
		counts[e.Reason]++
	}
	var words []string
	for reason, n := range counts {
		words = append(words, fmt.Sprintf("%s (%d)", reason, n))
	}
	slices.Sort(words)
	return strings.Join(words, "; ")
}

// ownDrift is the first difference that is about the Service or one of its addresses; empty: none is.
func (q *serviceQuestion) ownDrift(ctx context.Context, name string, all []dataplane.Drift) (string, error) {
	if len(all) == 0 {
		return "", nil
	}
	services, err := q.one(ctx, name)
	if err != nil {
		return "", err
	}
	marks := []string{name}
	for _, p := range services.Services[0].Ports {
		for _, a := range p.Addresses {
			marks = append(marks, a.At)
		}
	}
	for _, d := range all {
		if slices.ContainsFunc(marks, func(mark string) bool { return strings.Contains(d.String(), mark) }) {
			return d.String(), nil
		}
	}
	return "", nil
}

// checkKernel asks whether the kernel holds the rows of the Service.
func (q *serviceQuestion) checkKernel(ctx context.Context, f *findings) error {
	a, err := q.askAudit(ctx)
	if err != nil {
		f.warn("fairlead audit", "%v", err)
		return nil
	}
	own, err := q.ownDrift(ctx, f.Service, a.Refused)
	if err != nil {
		return err
	}
	switch {
	case own != "":
		f.fail("fairlead audit, fairlead status", "the kernel refuses rows of the Service: %s", own)
	case len(a.Refused) > 0:
		f.warn("fairlead audit, fairlead status", "the kernel refuses rows of other Services: %s", a.Refused[0])
	case len(a.Drifts) > 0 && !a.Repaired:
		f.fail("fairlead audit", "the kernel differs from the rows, and a repair has failed: %s; %s", a.Drifts[0], a.Error)
	case len(a.Drifts) > 0:
		f.warn("find the program that changes the rules: fairlead audit; the differences are repaired",
			"another program had changed the rules: %s", a.Drifts[0])
	default:
		f.ok("the kernel holds the rules of all %s", said.Count(a.Rows, "row"))
	}
	return nil
}

// answerTimeout is how long an address has to answer.
const answerTimeout = 2 * time.Second

// checkAnswers connects to the backends and to the ClusterIPs, and looks whether the counters move.
func (q *serviceQuestion) checkAnswers(ctx context.Context, f *findings) error {
	before, err := q.one(ctx, f.Service)
	if err != nil {
		return err
	}
	results, _ := probeAll(ctx, before, answerTimeout)
	dead := slices.DeleteFunc(slices.Clone(results), func(r probed) bool {
		return r.Error == "" || r.State != service.Ready
	})
	for _, r := range dead {
		f.fail("ask the pod itself: does it listen on that port, does a network policy let this node in?",
			"endpoint %s of port %s is called ready, and does not answer: %s", r.Endpoint, r.Port, r.Error)
	}
	tried := 0
	for _, p := range before.Services[0].Ports {
		for _, a := range p.Addresses {
			if a.Kind != "ClusterIP" || a.Verdict != "forward" || !strings.HasSuffix(p.Port, "/tcp") {
				continue
			}
			tried++
			if took, failure := connect(ctx, a.At, answerTimeout); failure != "" && len(dead) == 0 {
				f.fail("fairlead explain node "+a.At+"; fairlead help symptoms",
					"the backends of %s answer, and %s does not: %s", portText(p), a.At, failure)
			} else if failure == "" {
				f.ok("%s answers in %s", a.At, took.Round(10*time.Microsecond))
			}
		}
	}
	if tried == 0 {
		f.unknown("no ClusterIP with a port of TCP can be tried")
		return nil
	}
	if before.Counts && !f.failed() {
		return q.checkCounters(ctx, f, before)
	}
	return nil
}

// checkCounters looks whether the connections of checkAnswers were counted. A data plane may do so a moment later.
func (q *serviceQuestion) checkCounters(ctx context.Context, f *findings, before engine.Services) error {
	sum := func(s engine.Services) (n uint64) {
		for _, p := range s.Services[0].Ports {
			n += p.Connections
		}
		return n
	}
	for range 10 {
		after, err := q.one(ctx, f.Service)
		if err != nil {
			return err
		}
		if sum(after) > sum(before) {
			f.ok("the data plane has counted the connections: %d so far", sum(after))
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(answerTimeout / 20):
		}
	}
	f.warn("another program may serve the address: fairlead audit", "the data plane has not counted the connections")
	return nil
}
