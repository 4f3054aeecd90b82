package advise

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/bench"
	"fairlead.dev/fairlead/model"
)

// Options say what is measured.
type Options struct {
	Planes []Plane
	State  *model.State // the node's rows; they are only read
	// Duration is how long all of it may take.
	Duration time.Duration
	// Progress is told which plane is measured now, of how many; nil: it is not reported.
	Progress func(plane string, n, of int)
}

const (
	// servicesPerSecond is how many Services a plane is filled with for each second that it has. No more than these fit
	// in half of that, and it bounds the memory.
	servicesPerSecond = 5000
	// quickly is how long a machine that has nothing else to do takes for a scratch cluster. Where it takes longer all
	// else will, too, and so there are fewer Services.
	quickly = 100 * time.Millisecond
	// leastServices are measured in any case.
	leastServices = 100
	// rounds are enough for ratios that differ by a few percent.
	minRounds, maxRounds = 5, 50
	// changeTries are enough for a median.
	changeTries = 20
	// connections and requests are how many are made at a time.
	connections, requests = 20, 100
)

// Measure finds out what each plane does on this machine. It takes Duration, or little more: what a plane does not do
// in its share of that counts as not measured. The rest of the cleaning up is done in the background; Wait waits for
// it.
func Measure(ctx context.Context, o Options) *Measurement {
	o.Planes = slices.SortedStableFunc(slices.Values(o.Planes), func(p, q Plane) int {
		return cmp.Compare(preference(p.Name), preference(q.Name))
	})
	m := &Measurement{ended: make(chan struct{})}
	ctx, cancel := context.WithTimeout(ctx, o.Duration)
	results := make(chan Finding, len(o.Planes))
	go func() {
		defer close(m.ended)
		defer close(results)
		defer cancel()
		o.measureAll(ctx, results)
	}()
	m.gather(ctx, o, results)
	return m
}

// Measurement is what was found.
type Measurement struct {
	// Findings are of each plane, the preferred ones first: if time is up early, they are those that were measured.
	Findings []Finding
	ended    chan struct{}
}

// Wait returns when nothing of the measurement is left on the machine.
func (m *Measurement) Wait() { <-m.ended }

// gather takes findings as they come, until there are all or time is up.
func (m *Measurement) gather(ctx context.Context, o Options, results <-chan Finding) {
	var late <-chan time.Time
	for up, over := ctx.Done(), false; !over && len(m.Findings) < len(o.Planes); {
		select {
		case f := <-results:
			m.Findings = append(m.Findings, f)
		case <-up:
			up, late = nil, time.After(grace)
		case <-late:
			over = true
		}
	}
	for _, p := range o.Planes[len(m.Findings):] {
		m.Findings = append(m.Findings, Finding{Plane: p.Name, Unmeasured: "there was no time"})
	}
}

// grace is for what is being done in the kernel when time is up.
const grace = 200 * time.Millisecond

// measureAll measures one plane after the other, each beside a cluster without one.
func (o Options) measureAll(ctx context.Context, results chan<- Finding) {
	begin := time.Now()
	bare, err := newScratch(ctx)
	if err != nil {
		for _, p := range o.Planes {
			results <- Finding{Plane: p.Name, Unmeasured: unmeasured(err)}
		}
		return
	}
	defer bare.close()
	deadline, _ := ctx.Deadline()
	most := int(time.Until(deadline).Seconds() * servicesPerSecond / float64(len(o.Planes)))
	most = int(float64(most) * min(1, quickly.Seconds()/time.Since(begin).Seconds()))
	rows := newSample(o.State, max(leastServices, most))
	for i, p := range o.Planes {
		if o.Progress != nil {
			o.Progress(p.Name, i+1, len(o.Planes))
		}
		share := time.Until(deadline) / time.Duration(len(o.Planes)-i)
		results <- measure(ctx, trial{sample: rows, plane: p, bare: bare, share: share})
	}
}

// trial is the measurement of one plane.
type trial struct {
	*sample
	plane Plane
	share time.Duration // of the time
	bare  *scratch      // without a plane
	on    *scratch
}

func measure(ctx context.Context, t trial) (f Finding) {
	f.Plane = t.plane.Name
	ctx, cancel := context.WithTimeout(ctx, t.share)
	defer cancel()
	var err error
	if t.on, err = newScratch(ctx); err != nil {
		f.Unmeasured = unmeasured(err)
		return f
	}
	defer t.on.close()
	if err := t.on.open(t.plane); err != nil {
		f.tell(err)
		return f
	}
	figures, err := t.run(ctx, &f)
	if err != nil {
		f.Unmeasured = unmeasured(err)
		return f
	}
	f.Figures = figures
	return f
}

// tell says what became of an attempt to open a plane.
func (f *Finding) tell(err error) {
	if errors.Is(err, dataplane.ErrUnsupported) || errors.Is(err, unix.EPERM) {
		f.Missing = strings.TrimPrefix(strings.TrimPrefix(err.Error(), f.Plane+": "), dataplane.ErrUnsupported.Error()+": ")
		return
	}
	f.Unmeasured = unmeasured(err)
}

func unmeasured(err error) string {
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return "there was not enough time"
	case errors.Is(err, context.Canceled):
		return "it was interrupted"
	}
	return err.Error()
}

// run takes the figures. Rows that are not served are no error.
func (t *trial) run(ctx context.Context, f *Finding) (*Figures, error) {
	m := &Figures{Services: t.services}
	begin := time.Now()
	err := t.on.plane.Sync(ctx, t.state)
	m.Fill = time.Since(begin)
	if errors.Is(err, dataplane.ErrPartial) {
		f.Unserved, err = err.Error(), nil
	}
	if err == nil {
		m.Change, err = t.changes(ctx, begin.Add(t.share*2/3))
	}
	if err == nil {
		err = t.connections(ctx, m)
	}
	return m, err
}

// changes has an endpoint come and go, and returns the median.
func (t *trial) changes(ctx context.Context, until time.Time) (time.Duration, error) {
	var took []time.Duration
	for len(took) < 2 || len(took) < changeTries && time.Now().Before(until) {
		for _, step := range []struct {
			to     *model.State
			change model.Change
		}{{t.changed, t.there}, {t.state, t.back}} {
			begin := time.Now()
			if err := t.on.plane.Apply(ctx, step.to, step.change); err != nil && !errors.Is(err, dataplane.ErrPartial) {
				return 0, fmt.Errorf("change an endpoint: %w", err)
			}
			took = append(took, time.Since(begin))
		}
	}
	slices.Sort(took)
	return took[len(took)/2], nil
}

// connections compares them, and requests, with those in the cluster without a plane.
func (t *trial) connections(ctx context.Context, m *Figures) error {
	direct, through := t.bare.loop, t.on.loop
	var targets, backends []netip.AddrPort
	for _, k := range t.targets {
		targets = append(targets, k.AddrPort())
		backends = append(backends, netip.AddrPortFrom(serverAddr(k.Addr.Is6()), firstPort))
	}
	direct.Ask(backends...)
	through.Ask(targets...)
	next := func() bool {
		m.Rounds++
		return m.Rounds <= minRounds && ctx.Err() == nil || m.Rounds <= maxRounds && inTime(ctx)
	}
	samples, err := bench.Interleave([]bench.Variant{
		{Name: "direct", Slice: func() ([]time.Duration, error) { return direct.Connections(connections) }},
		{Name: "through", Slice: func() ([]time.Duration, error) { return through.Connections(connections) }},
		{Name: "direct request", Slice: func() ([]time.Duration, error) { return direct.Requests(requests) }},
		{Name: "through request", Slice: func() ([]time.Duration, error) { return through.Requests(requests) }},
	}, next)
	m.Rounds--
	if err == nil && m.Rounds < minRounds {
		err = context.DeadlineExceeded
	}
	if err != nil {
		return err
	}
	m.Connection = Ratio(samples.Series("through", 0.5).Ratio(samples.Series("direct", 0.5)))
	m.Request = Ratio(samples.Series("through request", 0.5).Ratio(samples.Series("direct request", 0.5)))
	return nil
}

// inTime reports whether there is time for another round, and to clean up.
func inTime(ctx context.Context) bool {
	deadline, ok := ctx.Deadline()
	return ctx.Err() == nil && (!ok || time.Until(deadline) > 50*time.Millisecond)
}
