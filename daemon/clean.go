package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/host"
	"fairlead.dev/fairlead/takeover"
)

// Clean removes all that any data plane, in this or an earlier process, and all that kube-proxy has
// made in the kernel, and says so, one line for each.
func Clean(ctx context.Context, out io.Writer, log *slog.Logger) error {
	return errors.Join(cleanOwn(ctx, out, false), cleanLeftovers(ctx, out, log))
}

// CleanOwn does that without kube-proxy's, which may be back already.
func CleanOwn(ctx context.Context, out io.Writer) error {
	back, err := usesIPVS()
	return errors.Join(err, cleanOwn(ctx, out, back))
}

// cleanOwn leaves what kube-proxy shares with us if that is back in mode ipvs.
func cleanOwn(ctx context.Context, out io.Writer, back bool) error {
	var errs []error
	for _, p := range planes() {
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

// Init does what needs more rights than CAP_NET_ADMIN: it has the kernel load modules, and sets what is
// the machine's. No Service is programmed.
func Init(o Options) error {
	c, err := load(o)
	if err != nil {
		return err
	}
	if c.Plane == autoPlane {
		r := host.Host{}.Apply(hostSettings(c))
		logHost(o.Logs.Logger(), r)
		return errors.Join(r.Err(), loadAll(c, o.Logs))
	}
	p, _, err := planeIn(c).open(dataplane.Config{Log: o.Logs.Logger()})
	if err != nil {
		return err
	}
	r := host.Host{}.Apply(hostSettings(c))
	logHost(o.Logs.Logger(), r)
	return errors.Join(r.Err(), p.Close(), prepare(c, found(p), o.Logs))
}
