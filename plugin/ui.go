package plugin

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/httpserve"
	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/plugin/ui"
)

func uiCommand() *cobra.Command {
	var i inspection
	var address string
	c := &cobra.Command{
		Use:   "ui",
		Short: "show in a browser what the running proxy does, until interrupted (Ctrl-C)",
		Long: "ui serves a page with the Services, their endpoints by state, rates, recent changes, and problems first.\n" +
			"The page changes nothing. It follows the running proxy, and waits for one that starts later. All users of\n" +
			"this machine can read it. With an address that others reach, they can read it, too.",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return i.page(c.Context(), address) },
	}
	i.AddTo(c)
	_ = c.Flags().MarkHidden("output") // fails only for flags that are not there
	c.Flags().StringVar(&address, "address", "127.0.0.1:10247", "`address:port` at which the page is")
	return c
}

// page serves the page until the context ends.
func (i *inspection) page(ctx context.Context, address string) error {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return cli.Misused(fmt.Errorf("--address: %w", err))
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return cli.Failed(fmt.Errorf("--address: %w", err))
	}
	if a := l.Addr().(*net.TCPAddr); !a.IP.IsLoopback() {
		fmt.Fprintln(os.Stderr, "warning: all who reach this address can read the page:", a)
	}
	fmt.Printf("http://%s/ shows the running proxy; Ctrl-C ends the page\n", l.Addr())
	page := ui.Handler(i.Text, host)
	s := httpserve.New(httpserve.Metrics(), nil).Server(page, slog.New(slog.DiscardHandler))
	context.AfterFunc(ctx, func() { _ = s.Close() })
	err = s.Serve(l)
	if ctx.Err() != nil {
		err = cli.Exit(cli.ExitInterrupted, nil)
	}
	return cli.Failed(err)
}
