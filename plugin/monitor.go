package plugin

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/plugin/ask"
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
	i.AddTo(c)
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
	if err != nil {
		return err
	}
	defer events.Close()
	text := func(e recorder.Event) (string, bool, error) { return e.String(), false, nil }
	err = ask.PrintLines(&i.Inspection, events, text)
	if ctx.Err() != nil { // Ctrl-C is how it ends
		return nil
	}
	return err
}
