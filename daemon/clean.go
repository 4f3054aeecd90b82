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
		remove := p.Remove
		if back && p.HandBack != nil {
			remove = p.HandBack
		}
		left, err := p.Inspect()
		if drain && left.Retired {
			fmt.Fprintln(out, p.Name+": open connections keep what they need; remove it later: fairlead clean --own")
			continue
		}
		if err == nil {
			err = remove(ctx, dataplane.Config{})
		}
		if err == nil && left.Rules {
			fmt.Fprintln(out, p.Name+": removed what there was")
		}
		errs = append(errs, permitted(err))
	}
	return errors.Join(errs...)
}
