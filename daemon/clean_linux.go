package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"

	"fairlead.dev/fairlead/takeover"
)

// Clean removes all that any data plane, in this or an earlier process, and all that kube-proxy has
// made in the kernel, and says so, one line for each.
func Clean(ctx context.Context, out io.Writer, log *slog.Logger) error {
	return errors.Join(cleanOwn(ctx, out, false, false), cleanLeftovers(ctx, out, log))
}

// CleanOwn does that without kube-proxy's, which may be back already, and leaves what open connections need.
func CleanOwn(ctx context.Context, out io.Writer) error {
	back, err := usesIPVS()
	return errors.Join(err, cleanOwn(ctx, out, back, true))
}

// usesIPVS reports whether kube-proxy has been here in mode ipvs, since Fairlead has removed what it had left.
func usesIPVS() (back bool, err error) {
	t, err := takeover.New(takeover.Config{})
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	return t.UsesIPVS()
}

// cleanLeftovers removes what is kube-proxy's, connections through IPVS included.
func cleanLeftovers(ctx context.Context, out io.Writer, log *slog.Logger) (err error) {
	t, err := takeover.New(takeover.Config{Log: log})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	found, err := t.Find(ctx)
	if err := t.Remove(ctx); err != nil {
		return err
	}
	for _, l := range found {
		what := "removed"
		if l.Stays != "" {
			what = "kept"
		}
		fmt.Fprintf(out, "kube-proxy: %s %s\n", what, l)
	}
	return err
}
