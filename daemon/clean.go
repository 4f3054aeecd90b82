package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"

	"fairlead.dev/fairlead/dataplane"
)

// cleanOwn leaves what kube-proxy shares with us if that is back in mode ipvs.
func cleanOwn(ctx context.Context, out io.Writer, back bool) error {
	var errs []error
	for _, p := range drivers() {
		remove := p.Remove
		if back && p.HandBack != nil {
			remove = p.HandBack
		}
		left, err := p.Inspect()
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
