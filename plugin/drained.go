package plugin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/util/wait"

	"fairlead.dev/fairlead/drain"
	"fairlead.dev/fairlead/internal/cli"
)

// waiter is a pod that terminates.
type waiter struct {
	hosts   []string // addresses of its node, one for each family that it has
	port    string
	timeout time.Duration
}

func waitDrainedCommand() *cobra.Command {
	w := waiter{}
	c := &cobra.Command{
		Use:   "wait-drained",
		Short: "in a pod's preStop hook: wait until no node sends the pod new connections",
		Long: "wait-drained asks the agent of the pod's node, which knows the pod by its address. A Service of the pod\n" +
			"needs the annotation fairlead.dev/drain-barrier: \"true\". In images without fairlead,\n" +
			"\"curl -f http://$HOST_IP:10256" + drain.Path + "\" or wget do the same.\n" +
			"Exit status 1: the time was up, and some nodes may still send connections; they are named. If this cannot be\n" +
			"found out, it has waited 15 seconds. Pods of the host's network share an address, and are told apart by nothing.",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return w.run(c.Context()) },
	}
	f := c.Flags()
	comma := func(r rune) bool { return r == ',' }
	f.StringSliceVar(&w.hosts, "host", strings.FieldsFunc(os.Getenv("HOST_IP"), comma),
		"the node's address, or one of each family: status.hostIP or status.hostIPs (default: $HOST_IP)")
	f.StringVar(&w.port, "port", "10256", "port of healthzBindAddress")
	f.DurationVar(&w.timeout, "timeout", drain.Timeout,
		"shorter than terminationGracePeriodSeconds by what the pod needs to end")
	return c
}

func (w *waiter) run(ctx context.Context) error {
	if len(w.hosts) == 0 || w.timeout <= 0 {
		return cli.Misused(errors.New("--host or $HOST_IP has to name the node's address, and --timeout a time"))
	}
	var g errgroup.Group
	began := time.Now()
	for _, host := range w.hosts {
		g.Go(func() error { return w.await(ctx, host, began.Add(w.timeout)) })
	}
	err := g.Wait()
	if err != nil { // connections come for a while, even if the Service lacks the annotation
		select {
		case <-time.After(min(w.timeout, drain.Unconfirmed) - time.Since(began)):
		case <-ctx.Done():
		}
	}
	return cli.Failed(err)
}

// await asks until there is an answer: the agent may be restarting.
func (w *waiter) await(ctx context.Context, host string, until time.Time) (err error) {
	const patience = 5 * time.Second // for the answer that the time is up
	ctx, cancel := context.WithDeadline(ctx, until.Add(patience))
	defer cancel()
	client := http.Client{Transport: &http.Transport{Proxy: nil}} // a proxy would ask in the name of another address
	_ = wait.PollUntilContextCancel(ctx, time.Second, true, func(ctx context.Context) (done bool, _ error) {
		url := fmt.Sprintf("http://%s%s?timeout=%s", net.JoinHostPort(host, w.port), drain.Path,
			max(time.Until(until), time.Millisecond))
		done, err = askDrained(ctx, &client, url)
		return done || time.Now().After(until), nil
	})
	return err
}

// askDrained also says whether that is the answer.
func askDrained(ctx context.Context, client *http.Client, url string) (done bool, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return true, err
	}
	response, err := client.Do(request)
	if err != nil {
		return false, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, 1<<16))
	text := strings.TrimSpace(string(body))
	switch {
	case err != nil:
		return false, err
	case response.StatusCode == http.StatusOK:
		fmt.Println(text)
		return true, nil
	}
	return response.StatusCode != http.StatusTooManyRequests, errors.New(text)
}
