package plugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/plugin/answer"
	"fairlead.dev/fairlead/plugin/ask"
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

func (q *serviceQuestion) why(ctx context.Context, name string) error {
	f := &answer.Findings{Service: q.named(name).String()}
	for _, check := range []func(context.Context, *answer.Findings) error{
		q.checkProxy, q.checkService, q.checkKernel, q.checkAnswers,
	} {
		if err := check(ctx, f); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return cli.Exit(cli.ExitInterrupted, nil)
		}
		if f.Failed() {
			break
		}
	}
	return errors.Join(q.Print(f), cli.Found(f.Failed()))
}

// silentWatch is after how long without a message a watch counts as stale. The API server sends a bookmark a minute.
const silentWatch = 5 * time.Minute

// checkProxy asks whether the proxy follows the cluster.
func (q *serviceQuestion) checkProxy(ctx context.Context, f *answer.Findings) error {
	var r answer.Status
	err := q.Get(ctx, "/status", &r.Report)
	switch {
	case errors.Is(err, ask.ErrNoProxy):
		f.Fail("start it, or name its --control-socket; all modes but userspace serve by their last rules", "%v", err)
		return nil
	case err != nil:
		return err
	}
	for _, w := range r.Watches {
		if age := r.Now.Sub(w.LastMessage); age > silentWatch {
			f.Fail("check the way from this node to the API server; the rules are those of that time",
				"the API server has said nothing of %s for %s", w.Resource, r.Age(w.LastMessage))
		}
	}
	if f.Failed() {
		return nil
	}
	if r.ConfigurationRefused != "" {
		f.Warn("correct the file; the configuration before it stays in force", "the configuration is refused: %s",
			strings.ReplaceAll(r.ConfigurationRefused, "\n", " "))
	}
	if r.Mode != r.Plane && r.Mode != "auto" && (r.Mode != "" || r.Plane != "iptables") {
		f.Warn("fairlead help symptoms, \"another data plane serves\"", "mode %s is configured, data plane %s serves: %s",
			r.Mode, r.Plane, cmp.Or(r.Why, "that is its meaning here"))
	}
	switch {
	case !r.Healthy:
		f.Fail("fairlead status, and the log of the proxy", "the proxy is not healthy: %s",
			strings.TrimPrefix(r.Health(), "no: "))
	case r.Failures > 0:
		f.Warn("fairlead status", "the kernel has refused rows %s in a row: %s", said.Count(r.Failures, "time"),
			r.BriefError())
	default:
		f.OK("the proxy follows the cluster, by data plane %s", r.PlaneText())
	}
	return nil
}

// checkService asks what the Service's objects say.
func (q *serviceQuestion) checkService(ctx context.Context, f *answer.Findings) error {
	namespace, name, _ := strings.Cut(f.Service, "/")
	all, err := q.one(ctx, f.Service)
	switch {
	case errors.Is(err, errUnknown):
		f.Fail(fmt.Sprintf("kubectl -n %s get service %s --show-labels", namespace, name), "%v", err)
		return nil
	case err != nil:
		return err
	}
	s := all.Services[0]
	if s.Ignored != "" {
		f.Fail("clients use its DNS name or its pods' addresses", "this proxy does not serve it: %s", s.Ignored)
		return nil
	}
	for _, p := range s.Problems {
		f.Warn("correct the object", "%s", strings.ReplaceAll(p.Error(), "\n", " "))
	}
	if s.Slices == 0 { // the controller leaves an empty slice where no pod matches
		f.Fail(fmt.Sprintf("compare: kubectl -n %s get service %s -o jsonpath={.spec.selector}; "+
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
func checkPort(f *answer.Findings, s *engine.ServiceReport, p *service.PortSummary) {
	namespace, name, _ := strings.Cut(s.Service, "/")
	pods := fmt.Sprintf("kubectl -n %s get pods -o wide; kubectl -n %s describe endpointslices -l "+
		"kubernetes.io/service-name=%s", namespace, namespace, name)
	switch {
	case p.Unserved != "":
		f.Fail("give the port the same name and protocol in both, as a container has it",
			"port %s has no endpoints: %s", portText(*p), p.Unserved)
	case p.Ready+p.Draining+p.Excluded == 0:
		f.Fail(pods, "port %s has no endpoints: no pod matches the selector", portText(*p))
	case p.Ready == 0:
		f.Fail(pods, "port %s has no endpoint that takes connections: %s", portText(*p), excluded(p))
	default:
		f.OK("port %s: %s", portText(*p), endpointText(*p))
	}
	for _, a := range p.Addresses {
		at := fmt.Sprintf("%s (%s)", a.At, a.Kind)
		switch {
		case a.Owner != "":
			f.Warn("give one of the two another address or port",
				"%s is the address of Service %s, which came first", at, a.Owner)
		case a.Verdict == service.Passthrough:
			f.OK("packets to %s are left to routing: externalFailoverPolicy is Passthrough, and no endpoint on this node "+
				"takes them", at)
		case a.Verdict == "pass":
			f.Warn("see the problems of the Service", "%s is not served", at)
		case a.Verdict == "drop" && a.Kind == "ClusterIP":
			f.Fail("use internalTrafficPolicy Cluster, or run a pod on this node",
				"packets to %s are dropped: internalTrafficPolicy is Local, and no endpoint on this node takes them", at)
		case a.Verdict == "drop":
			f.Warn("use externalTrafficPolicy Cluster, or another node",
				"packets to %s are dropped: externalTrafficPolicy is Local, and no endpoint on this node takes them", at)
		case a.Verdict == "reject" && p.Ready > 0:
			f.Warn("let the pods have addresses of both families, or the Service one family",
				"connections to %s are refused: no endpoint of its address family takes them", at)
		}
		if a.Sources > 0 {
			ranges := a.Source
			if a.Sources > 1 {
				ranges += " and " + said.Count(a.Sources-1, "other range")
			}
			f.Warn("add the range of the client that is left out; fairlead explain CLIENT "+a.At,
				"%s is for clients of %s only: spec.loadBalancerSourceRanges", at, ranges)
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

// ownDrift is a difference that is about one of the Service's addresses or, if none is, about the Service; empty: none
// is.
func (q *serviceQuestion) ownDrift(ctx context.Context, name string, all []dataplane.Drift) (string, error) {
	if len(all) == 0 {
		return "", nil
	}
	services, err := q.one(ctx, name)
	if err != nil {
		return "", err
	}
	var marks []string
	for _, p := range services.Services[0].Ports {
		for _, a := range p.Addresses {
			marks = append(marks, a.At)
		}
	}
	return firstOf(all, append(marks, name)), nil
}

// firstOf is the first difference that has one of some addresses or names as a whole; empty: none has. Other names and
// ports may begin or end in the same way.
func firstOf(all []dataplane.Drift, marks []string) string {
	for _, mark := range marks {
		whole := regexp.MustCompile(`(^|[^\w.-])` + regexp.QuoteMeta(mark) + `($|[^\w.-])`)
		for _, d := range all {
			if text := d.String(); whole.MatchString(text) {
				return text
			}
		}
	}
	return ""
}

// checkKernel asks whether the kernel holds the rows of the Service.
func (q *serviceQuestion) checkKernel(ctx context.Context, f *answer.Findings) error {
	var a engine.Audited
	if err := q.Get(ctx, "/audit", &a); err != nil {
		f.Warn("fairlead audit", "%v", err)
		return nil
	}
	refused, err := q.ownDrift(ctx, f.Service, a.Refused)
	if err != nil {
		return err
	}
	drift, err := q.ownDrift(ctx, f.Service, a.Drifts)
	var r answer.Status
	if err = errors.Join(err, q.Get(ctx, "/status", &r.Report)); err != nil {
		return err
	}
	switch {
	case refused != "":
		f.Fail("fairlead audit, fairlead status", "the kernel refuses rows of the Service: %s", refused)
	case len(a.Refused) > 0:
		f.Warn("fairlead audit, fairlead status", "the kernel refuses rows of other Services: %s", a.Refused[0])
	case len(a.Drifts) > 0 && !a.Repaired:
		f.Fail("fairlead audit", "the kernel differs from the rows, and a repair has failed: %s; %s", a.Drifts[0], a.Error)
	case drift != "" && r.Undone != nil && r.Undone.Rarer:
		f.Fail("stop the program that changes the rules, or have it leave Fairlead's alone; fairlead status",
			"%s changes the rules of the Service again and again (%s): %s",
			cmp.Or(r.Undone.Author, "another program"), said.Count(r.Undone.Repairs, "repair"), drift)
	case len(a.Drifts) > 0:
		f.Warn("if it comes again, stop the program that changes the rules; fairlead status names it",
			"%s changed the rules, and Fairlead has repaired them: %s",
			cmp.Or(dataplane.Authors(a.ExternalChanges), "another program"), cmp.Or(drift, a.Drifts[0].String()))
	default:
		f.OK("the kernel holds the rules of all %s", said.Count(a.Rows, "row"))
	}
	return nil
}

// answerTimeout is how long an address has to answer.
const answerTimeout = 2 * time.Second

// checkAnswers connects to the backends and to the ClusterIPs, and looks whether the counters move.
func (q *serviceQuestion) checkAnswers(ctx context.Context, f *answer.Findings) error {
	before, err := q.one(ctx, f.Service)
	if err != nil {
		return err
	}
	results, _ := probeAll(ctx, before, answerTimeout)
	dead := slices.DeleteFunc(slices.Clone(results), func(r probed) bool {
		return r.Error == "" || r.State != service.Ready
	})
	for _, r := range dead {
		do, what := "do its network policies let this node in? does its node work?", "does not answer: "+r.Error
		if strings.Contains(r.Error, "refused") {
			do, what = "does a process of the pod listen on that port? compare with targetPort", "refuses connections"
		}
		f.Fail(do, "endpoint %s of port %s is ready by its EndpointSlice, and %s (%d of %d)", r.Endpoint, r.Port, what,
			len(dead), len(results))
	}
	tried := 0
	for _, p := range before.Services[0].Ports {
		for _, a := range p.Addresses {
			if a.Kind != "ClusterIP" || a.Verdict != "forward" || !strings.HasSuffix(p.Port, "/tcp") {
				continue
			}
			tried++
			if took, failure := connect(ctx, a.At, answerTimeout); failure != "" && len(dead) == 0 {
				f.Fail("fairlead explain node "+a.At+"; fairlead help symptoms",
					"the backends of %s answer, and %s does not: %s", portText(p), a.At, failure)
			} else if failure == "" {
				f.OK("%s answers in %s", a.At, took.Round(10*time.Microsecond))
			}
		}
	}
	if tried == 0 {
		f.Unknown("no ClusterIP with a port of TCP can be tried")
		return nil
	}
	if before.Counts && !f.Failed() {
		return q.checkCounters(ctx, f, before)
	}
	return nil
}

// checkCounters looks whether the connections of checkAnswers were counted. A data plane may do so a moment later.
func (q *serviceQuestion) checkCounters(ctx context.Context, f *answer.Findings, before engine.Services) error {
	sum := func(s engine.Services) (n uint64) {
		for _, p := range s.Services[0].Ports {
			n += p.Connections
		}
		return n
	}
	for range 50 {
		after, err := q.one(ctx, f.Service)
		if err != nil {
			return err
		}
		if sum(after) > sum(before) {
			f.OK("the data plane has counted the connections: %d so far", sum(after))
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(answerTimeout / 20):
		}
	}
	f.Warn("another program may serve the address: fairlead audit", "the data plane has not counted the connections")
	return nil
}
