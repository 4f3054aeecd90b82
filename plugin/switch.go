package plugin

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/daemon"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/plugin/ask"
)

func switchCommand() *cobra.Command {
	var i inspection
	c := &cobra.Command{
		Use:   "switch PLANE",
		Short: "change the data plane of the running proxy, while connections go on",
		Long: "switch has the running proxy serve by another data plane: " + strings.Join(daemon.Planes(), ", ") + ".\n" +
			"The new one is programmed and read back while the old one serves. Only then the old one goes. If anything\n" +
			"fails before, the old one stays and nothing is left of the new one. Interrupted (Ctrl-C) before the new one\n" +
			"is in force, it does the same.\n\n" +
			"The configuration stays as it is: the next start goes back to its mode, unless you set it, too.\n\n" +
			"Exit status 1: the old data plane stays, or no proxy runs. 2: there is no such data plane.",
		Example: "  fairlead switch ebpf",
		Args:    onePlane,
		RunE:    func(c *cobra.Command, args []string) error { return i.switchTo(c.Context(), args[0]) },
	}
	i.AddTo(c)
	return c
}

func onePlane(_ *cobra.Command, args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("name a data plane, one of %s: fairlead switch PLANE", strings.Join(daemon.Planes(), ", "))
	}
	return nil
}

// switchTo orders another data plane and shows what becomes of it. An interruption does not hang up, but asks for the
// end: so the user sees what is in force then.
func (i *inspection) switchTo(ctx context.Context, plane string) error {
	steps, err := i.Order(context.WithoutCancel(ctx), http.MethodPost, "/switch?"+url.Values{"plane": {plane}}.Encode())
	var refused engine.Refused
	if errors.As(err, &refused) && refused.Status == http.StatusBadRequest {
		return cli.Misused(err)
	}
	if err != nil {
		return err
	}
	defer steps.Close()
	defer context.AfterFunc(ctx, func() { i.interrupt(context.WithoutCancel(ctx)) })()
	err = ask.PrintLines(&i.Inspection, steps, ask.StepText)
	if errors.Is(err, ask.ErrEnded) {
		return cli.Failed(fmt.Errorf("%w; when it runs again, \"fairlead status\" says what is in force", err))
	}
	return err
}

func (i *inspection) interrupt(ctx context.Context) {
	const patience = 10 * time.Second
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	answer, err := i.Order(ctx, http.MethodDelete, "/switch")
	if err != nil {
		fmt.Fprintln(os.Stderr, "fairlead:", err)
		return
	}
	answer.Close()
}
