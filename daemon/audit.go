package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/service"
)

// Audit compares what the data plane that is found in the kernel holds with the rows of a Table, without a daemon and
// without a change.
func Audit(ctx context.Context, c *config.Config, t *service.Table, log *slog.Logger) (a engine.Audited, err error) {
	there, err := settingsFound(planeIn(c))
	if err != nil {
		return a, err
	}
	o, err := there.openItself(dataplane.Config{Log: log})
	if err != nil {
		return a, permitted(err)
	}
	defer func() { err = errors.Join(err, o.Close()) }()
	state, _, _ := t.Update(service.Batch{})
	a = engine.Audited{Plane: there.name, Rows: state.Rows(), Drifts: []dataplane.Drift{}}
	start := time.Now()
	r, err := o.Audit(ctx, state, dataplane.Full)
	a.Drifts, a.Took = append(a.Drifts, r.Drifts...), time.Since(start)
	return a, err
}

// settingsFound are those of the configuration, for the plane whose rules are in the kernel.
func settingsFound(s planeSettings) (planeSettings, error) {
	var names []string
	for _, p := range drivers() {
		left, err := p.Inspect()
		if err != nil {
			return s, fmt.Errorf("look for the data plane %s: %w", p.Name, permitted(err))
		}
		if left.Rules {
			names = append(names, p.Name)
		}
	}
	switch {
	case len(names) == 0:
		return s, errors.New("the kernel holds no data plane's rules")
	case names[len(names)-1] == ebpfPlane: // beside it may be what serves the rest
		return s, errors.New("only the running process can read the tables of data plane ebpf; audit it without --manifests")
	case len(names) > 1:
		return s, fmt.Errorf("the kernel holds rules of several data planes (%v), all but one of which Fairlead will "+
			"remove; try again", names)
	}
	s.name = names[0]
	return s, nil
}
