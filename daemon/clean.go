package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"

	"fairlead.dev/fairlead/dataplane"
)

// cleanOwn leaves what kube-proxy shares with us if that is back in mode ipvs. If drain is set, it leaves what open
// connections need, too.
func cleanOwn(ctx context.Context, out io.Writer, back, drain bool) error {
	var errs []error
	for _, p := range drivers() {
		left, err := p.Inspect()
		open := 0
		switch {
		case err != nil:
		case back && p.HandBack != nil:
			err = p.HandBack(ctx, dataplane.Config{})
		case drain && left.Rules && p.Drain != nil:
			open, err = p.Drain(ctx, dataplane.Config{})
		default:
			err = p.Remove(ctx, dataplane.Config{})
		}
		switch {
		case err != nil:
		case open > 0:
			fmt.Fprintf(out, "%s: %d open connections keep what they need; remove it later: fairlead clean --own\n",
				p.Name, open)
		case left.Rules:
			fmt.Fprintln(out, p.Name+": removed what there was")
		}
		errs = append(errs, permitted(err))
	}
	return errors.Join(errs...)
}
