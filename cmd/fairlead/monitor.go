package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/recorder"
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
			"has a share of the lines, at most 50 in a second. A line counts those left out.\n\n" +
			"With -o json each line is an object with time, kind and message. Others are there where they apply:\n" +
			"service, verdict (forwarded, refused, dropped), client, destination, backends (the first few), count.\n" +
			"An object details has the keys of a line of the log. Kinds: " + strings.Join(kinds(), ", ") + ".",
		Example: "  fairlead monitor --service default/web\n" +
			"  fairlead monitor --verdict refused,dropped",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return i.monitor(c.Context(), service, verdicts) },
	}
	i.AddTo(c.Flags())
	c.Flags().StringVar(&service, "service", "", "print what is about this Service only: `namespace/name`, or with :port")
	c.Flags().StringSliceVar(&verdicts, "verdict", nil,
		"print connections of these verdicts only: "+strings.Join(recorder.Verdicts(), ", "))
	return c
}

func kinds() (names []string) {
	for _, k := range recorder.Kinds() {
		names = append(names, string(k))
	}
	return names
}

func (i *inspection) monitor(ctx context.Context, service string, verdicts []string) error {
	if err := i.Check(); err != nil {
		return err
	}
	if service != "" && strings.Count(service, "/") != 1 {
		return cli.Misused(fmt.Errorf("--service: %q is not namespace/name", service))
	}
	for _, v := range verdicts {
		if !slices.Contains(recorder.Verdicts(), v) {
			return cli.Misused(fmt.Errorf("--verdict: %q is none of %s", v, strings.Join(recorder.Verdicts(), ", ")))
		}
	}
	q := url.Values{"follow": {"true"}, "service": {service}, "verdict": {strings.Join(verdicts, ",")}}
	events, err := i.Order(ctx, http.MethodGet, "/events?"+q.Encode())
	if ctx.Err() != nil {
		return nil
	}
	if errors.Is(err, cli.ErrNoProxy) {
		return cli.Misused(err)
	}
	if err != nil {
		return cli.Failed(err)
	}
	defer events.Close()
	lines := bufio.NewScanner(events)
	for lines.Scan() {
		if err := i.printEvent(lines.Bytes()); err != nil {
			return err
		}
	}
	if ctx.Err() != nil { // Ctrl-C is how it ends
		return nil
	}
	return cli.Failed(errors.Join(errors.New("the proxy has ended"), lines.Err()))
}

// printEvent prints one line of JSON, as it is or for people.
func (i *inspection) printEvent(line []byte) error {
	if i.Output == "json" {
		_, err := fmt.Printf("%s\n", line)
		return cli.Failed(err)
	}
	var e recorder.Event
	if err := json.Unmarshal(line, &e); err != nil {
		return cli.Failed(fmt.Errorf("the proxy's answer: %w", err))
	}
	_, err := fmt.Println(e)
	return cli.Failed(err)
}
