package plugin

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/plugin/ask"
	"fairlead.dev/fairlead/recorder"
	"fairlead.dev/fairlead/said"
)

func monitorCommand() *cobra.Command {
	var i inspection
	var service string
	var verdicts []string
	c := &cobra.Command{
		Use:   "monitor",
		Short: "print what happens: changes, backends, repairs, connections, what is refused",
		Long: "monitor prints an event a line until it is interrupted (Ctrl-C). Events are rows that changed, backends\n" +
			"that joined or left, repairs, lines of the log, and connections. Of a connection it names the backend, or why\n" +
			"it was refused or dropped. The first line says which connections the data plane can tell of. Each namespace\n" +
			"has a share of the lines, at most 50 in a second. A line counts those left out. Connections are those of the\n" +
			"network namespace in which monitor runs: run it on the node, or in the proxy's pod.\n\n" +
			"With -o json each line is an object with time, kind and message. Others are there where they apply:\n" +
			"service, verdict (forwarded, refused, dropped), client, destination, backends (the first few), count.\n" +
			"An object details has the keys of a line of the log. Kinds: " + strings.Join(kinds(), ", ") + ".",
		Example: "  fairlead monitor --service default/web\n" +
			"  fairlead monitor --verdict refused,dropped",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return i.monitor(c.Context(), service, verdicts) },
	}
	i.AddTo(c)
	c.Flags().StringVar(&service, "service", "", "print what is about this Service only: `namespace/name`, or with :port")
	c.Flags().StringSliceVar(&verdicts, "verdict", nil,
		"print connections of these verdicts only: forwarded, refused, dropped")
	return c
}

// maxLines is how many lines of a namespace are printed in a second, if there are few of others.
const maxLines = 50

func kinds() []string {
	var names []string
	for _, k := range []recorder.Kind{
		recorder.Info, recorder.Warning, recorder.Error, recorder.Problem, recorder.Rows, recorder.Drift, recorder.Sync,
		recorder.Repair, recorder.Joined, recorder.Left, recorder.Monitor, recorder.Connection, recorder.Refused,
		recorder.LeftOut,
	} {
		names = append(names, string(k))
	}
	return names
}

// monitor prints events of the running proxy, and of connections.
type monitor struct {
	print    func(recorder.Event) error
	service  string   // empty: all
	verdicts []string // nil: all
	share    said.Share
}

func (i *inspection) monitor(ctx context.Context, service string, verdicts []string) error {
	if service != "" && strings.Count(service, "/") != 1 {
		return cli.Misused(fmt.Errorf("--service: %q is not namespace/name", service))
	}
	known := []string{recorder.Forwarded, recorder.Rejected, recorder.Dropped}
	for _, v := range verdicts {
		if !slices.Contains(known, v) {
			return cli.Misused(fmt.Errorf("--verdict: %q is none of %s", v, strings.Join(known, ", ")))
		}
	}
	answer, err := i.Order(ctx, http.MethodGet, "/events?follow=true")
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return err
	}
	defer answer.Close()
	m := newMonitor(printEvent, service, verdicts)
	if i.Output == "json" {
		m.print = func(e recorder.Event) error { return json.NewEncoder(os.Stdout).Encode(e) }
	}
	err = m.follow(ctx, answer, &sampler{ask: i.Text, get: i.Get})
	if ctx.Err() != nil { // Ctrl-C is how it ends
		return nil
	}
	return cli.Failed(err)
}

func newMonitor(out func(recorder.Event) error, service string, verdicts []string) *monitor {
	return &monitor{out, service, verdicts, said.Share{Words: 2 * maxLines, While: time.Second}}
}

// follow ends when the proxy does.
func (m *monitor) follow(ctx context.Context, answer io.Reader, s *sampler) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	events, samples := make(chan recorder.Event), make(chan []recorder.Event)
	go func() {
		defer close(events)
		for lines := json.NewDecoder(answer); ; {
			var e recorder.Event
			if lines.Decode(&e) != nil {
				return
			}
			select {
			case events <- e:
			case <-ctx.Done():
				return
			}
		}
	}()
	go s.run(ctx, samples)
	second := time.NewTicker(time.Second)
	defer second.Stop()
	for err := error(nil); ; {
		select {
		case e, more := <-events:
			if !more {
				return ask.ErrEnded
			}
			if e.Kind == recorder.Rows || e.Kind == recorder.Sync {
				s.changed.Store(true)
			}
			err = m.tell(e)
		case some := <-samples:
			err = m.tell(some...)
		case <-second.C:
			err = m.tellLeftOut()
		}
		if err != nil {
			return err
		}
	}
}

// tell prints the events that are wanted, if their namespaces have not had their share.
func (m *monitor) tell(all ...recorder.Event) error {
	for _, e := range all {
		always := e.Kind == recorder.Monitor || e.Kind == recorder.LeftOut
		if !always && (!m.wants(&e) || !m.share.May(e.Namespace(), time.Now())) {
			continue
		}
		if err := m.print(e); err != nil {
			return err
		}
	}
	return nil
}

func (m *monitor) wants(e *recorder.Event) bool {
	if m.service != "" && e.Service != m.service && !strings.HasPrefix(e.Service, m.service+":") &&
		e.Details["object"] != "Service "+m.service {
		return false
	}
	return m.verdicts == nil || slices.Contains(m.verdicts, e.Verdict)
}

// tellLeftOut says once a second how many lines were left out.
func (m *monitor) tellLeftOut() error {
	n, of := m.share.Withheld()
	if n == 0 {
		return nil
	}
	e := recorder.Event{Time: time.Now(), Kind: recorder.LeftOut, Count: n, Message: said.Count(n, "line") + " more"}
	if of[0] != "" {
		e.Message += ", most of namespace " + of[0]
	}
	return m.tell(e)
}

// printEvent prints a line for people.
func printEvent(e recorder.Event) error {
	var text strings.Builder
	fmt.Fprintf(&text, "%s %-10s", e.Time.Local().Format("15:04:05.000"), e.Kind)
	if e.Service != "" {
		fmt.Fprintf(&text, " %s", e.Service)
	}
	fmt.Fprintf(&text, " %s", e.Message)
	for _, k := range slices.Sorted(maps.Keys(e.Details)) {
		fmt.Fprintf(&text, " %s=%s", k, e.Details[k])
	}
	_, err := fmt.Println(strings.ReplaceAll(text.String(), "\n", "; "))
	return err
}
