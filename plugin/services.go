package plugin

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/duration"
	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/service"
)

// serviceQuestion is about Services of the running proxy.
type serviceQuestion struct {
	inspection
	namespace string
}

func servicesCommand() *cobra.Command {
	var q serviceQuestion
	var watch bool
	c := &cobra.Command{
		Use:   "services [[NAMESPACE/]NAME]",
		Short: "list the Services: where they are reached, their endpoints, their connections",
		Long: "services lists each port of a Service: its addresses, endpoints by state, connections and last change.\n" +
			"With a NAME, or -o wide, each endpoint has a line too, with the reason if it takes no new connections. A dash\n" +
			"means that the data plane counts no connections.",
		Example: "  fairlead services -n shop\n  fairlead services shop/cart\n  fairlead services -o json --watch",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			switch {
			case !watch:
				return q.list(c.Context(), args)
			case q.Output == "yaml":
				return cli.Misused(errors.New("--watch has no output yaml; use json"))
			}
			return q.watch(c.Context(), args)
		},
		ValidArgsFunction: q.complete,
	}
	q.More = []string{"wide", "yaml"}
	q.addTo(c)
	c.Flags().BoolVarP(&watch, "watch", "w", false, "go on, and print the lines that change, every two seconds")
	return c
}

// addTo adds the flags of a question, with the completion of namespaces.
func (q *serviceQuestion) addTo(c *cobra.Command) {
	q.AddTo(c)
	c.Flags().StringVarP(&q.namespace, "namespace", "n", "", "of the Services (default: all; with a NAME: default)")
	_ = c.RegisterFlagCompletionFunc("namespace", // fails only for flags that are not there
		func(c *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
			names, directive := q.complete(c, nil, "")
			for i, name := range names {
				names[i], _, _ = strings.Cut(name, "/")
			}
			return slices.Compact(names), directive // they are sorted
		})
}

// complete names the Services for the shell.
func (q *serviceQuestion) complete(c *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, cancel := context.WithTimeout(c.Context(), time.Second)
	defer cancel()
	all, err := q.services(ctx, url.Values{"namespace": {q.namespace}})
	var names []string
	for _, s := range all.Services {
		names = append(names, s.Service)
	}
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// about is the question for a Service, or for all if there is no name.
func (q *serviceQuestion) about(args []string) url.Values {
	v := url.Values{"namespace": {q.namespace}}
	if len(args) > 0 {
		name := q.named(args[0])
		v = url.Values{"namespace": {name.Namespace}, "name": {name.Name}, "endpoints": {"1"}}
	}
	return v
}

// named reads the name of a Service: NAME, NAMESPACE/NAME, or svc/NAMESPACE/NAME.
func (q *serviceQuestion) named(text string) service.Name {
	text = strings.TrimPrefix(text, "svc/")
	if namespace, name, both := strings.Cut(text, "/"); both {
		return service.Name{Namespace: namespace, Name: name}
	}
	return service.Name{Namespace: cmp.Or(q.namespace, "default"), Name: text}
}

// services has the running proxy tell of Services.
func (i *inspection) services(ctx context.Context, q url.Values) (s engine.Services, err error) {
	err = i.Get(ctx, "/services?"+q.Encode(), &s)
	return s, err
}

// errUnknown says that the proxy has no such Service.
var errUnknown = errors.New("the proxy has no such Service: it does not exist, or it is headless (clusterIP: None)")

// one is a Service by its name.
func (q *serviceQuestion) one(ctx context.Context, name string) (engine.Services, error) {
	return q.some(ctx, []string{name}, true)
}

// some are the Service of a name or, if there is no name, all.
func (q *serviceQuestion) some(ctx context.Context, args []string, endpoints bool) (engine.Services, error) {
	about := q.about(args)
	if endpoints {
		about.Set("endpoints", "1")
	}
	all, err := q.services(ctx, about)
	if err == nil && len(args) > 0 && len(all.Services) == 0 {
		err = cli.Failed(fmt.Errorf("%s: %w", q.named(args[0]), errUnknown))
	}
	return all, err
}

func (q *serviceQuestion) list(ctx context.Context, args []string) error {
	wide := q.Output == "wide" || len(args) > 0
	all, err := q.some(ctx, args, q.Output != "text")
	switch {
	case err != nil:
		return err
	case q.Output == "json":
		return cli.PrintJSON(all)
	case q.Output == "yaml":
		text, err := yaml.Marshal(all)
		_, failure := os.Stdout.Write(text)
		return cli.Failed(errors.Join(err, failure))
	}
	rows := [][]string{{"SERVICE", "PORT", "ADDRESSES", "ENDPOINTS", "CONNECTIONS", "LAST CHANGE"}}
	for _, s := range all.Services {
		rows = append(rows, serviceRows(all, s, wide)...)
	}
	return cli.PrintTable(rows)
}

// watchEvery is the time between two looks.
const watchEvery = 2 * time.Second

// watch prints the lines that have changed since they were printed last, until the context ends.
func (q *serviceQuestion) watch(ctx context.Context, args []string) error {
	printed := map[string]string{}
	next := time.NewTicker(watchEvery)
	defer next.Stop()
	for known := false; ; {
		all, err := q.some(ctx, args, q.Output == "wide")
		if known && errors.Is(err, errUnknown) { // it is gone, and may come again
			err = nil
		}
		if err != nil && ctx.Err() == nil {
			return err
		}
		if err == nil {
			known = true
			q.printChanges(all, q.Output == "wide" || len(args) > 0, printed)
		}
		select {
		case <-ctx.Done():
			return cli.Exit(cli.ExitInterrupted, nil)
		case <-next.C:
		}
	}
}

// printChanges prints the Services whose lines differ from those printed last, ages apart, and those that are gone.
func (q *serviceQuestion) printChanges(all engine.Services, wide bool, printed map[string]string) {
	there := map[string]bool{}
	for _, s := range all.Services {
		there[s.Service] = true
		rows := serviceRows(all, s, wide)
		same := s
		same.Changed, same.Took = time.Time{}, 0
		now := fmt.Sprint(serviceRows(all, same, true))
		if printed[s.Service] == now {
			continue
		}
		printed[s.Service] = now
		if q.Output == "json" {
			text, _ := json.Marshal(s) // our types can
			fmt.Println(string(text))
			continue
		}
		for _, row := range rows {
			fmt.Println(time.Now().Format(time.TimeOnly), strings.Join(row, "  "))
		}
	}
	for name := range printed {
		if there[name] {
			continue
		}
		delete(printed, name)
		if q.Output == "json" {
			fmt.Printf("{\"service\":%q,\"gone\":true}\n", name)
		} else {
			fmt.Println(time.Now().Format(time.TimeOnly), name, "is gone")
		}
	}
}

// serviceRows are a Service's in the table: one for each port, and for each endpoint if there is room.
func serviceRows(all engine.Services, s engine.ServiceReport, wide bool) (rows [][]string) {
	row := func(columns ...string) { rows = append(rows, columns) }
	if s.Ignored != "" {
		row(s.Service, "", "not served: "+s.Ignored, "", "", "")
		return rows
	}
	changed := ""
	if !s.Changed.IsZero() {
		age := duration.HumanDuration(all.Now.Sub(s.Changed))
		changed = fmt.Sprintf("%s ago, took %s", age, s.Took.Round(time.Microsecond))
	}
	for _, p := range s.Ports {
		row(s.Service, portText(p), addressText(p, wide), endpointText(p), connectionText(all, p.Counted), changed)
		if p.Spill != "" {
			row("    " + p.Spill)
		}
		for _, e := range p.Endpoints {
			if wide {
				row("    " + stateText(e) + countText(all, e.Counted, p.Counted)) // no columns: it is long
			}
		}
	}
	for _, problem := range s.Problems {
		row("    problem: " + strings.ReplaceAll(problem.Error(), "\n", " "))
	}
	return rows
}

func portText(p service.PortSummary) string { return strings.TrimSpace(p.Name + " " + p.Port) }

// addressText names all addresses, or the ClusterIP and the numbers of others.
func addressText(p service.PortSummary, wide bool) string {
	var words []string
	others := 0
	for _, a := range p.Addresses {
		text := a.At
		if a.Kind != "ClusterIP" {
			text = a.Kind + " " + a.At
		}
		switch {
		case a.Owner != "":
			text += " (taken by " + a.Owner + ")"
		case a.Verdict != "forward":
			text += " (" + a.Verdict + ")"
		case a.Kind == "NodePort" && !wide:
			continue
		case len(words) >= 3 && !wide:
			others++
			continue
		}
		words = append(words, text)
	}
	if p.NodePort != 0 && !wide {
		words = append(words, fmt.Sprintf("NodePort %d", p.NodePort))
	}
	if others > 0 {
		words = append(words, fmt.Sprintf("%d more", others))
	}
	return strings.Join(words, ", ")
}

func endpointText(p service.PortSummary) string {
	text := fmt.Sprintf("%d ready", p.Ready)
	if p.Draining > 0 {
		text += fmt.Sprintf(", %d draining", p.Draining)
	}
	if p.Excluded > 0 {
		text += fmt.Sprintf(", %d excluded", p.Excluded)
	}
	return text
}

func stateText(e service.EndpointState) string {
	text := e.At
	if e.Node != "" {
		text += " on " + e.Node
	}
	text += ": " + e.State
	if e.Reason != "" {
		text += ", " + e.Reason + " (" + e.Object + ")"
	}
	if e.Outside != "" {
		text += "; for clients outside of the cluster: " + e.Outside
	}
	return text
}

func connectionText(all engine.Services, c service.Counted) string {
	text := fmt.Sprint(c.Connections)
	if !all.Counts {
		text = "-"
	}
	if c.Failed > 0 {
		text += fmt.Sprintf(" (%d failed)", c.Failed)
	}
	return text
}

// countText is what an endpoint got of a port's connections.
func countText(all engine.Services, e, of service.Counted) string {
	if of.Connections == 0 {
		return ""
	}
	share := 100 * float64(e.Connections) / float64(of.Connections)
	return fmt.Sprintf("; connections: %s (%.0f %%)", connectionText(all, e), share)
}
