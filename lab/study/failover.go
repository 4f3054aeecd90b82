package study

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
	"fairlead.dev/fairlead/lab/testbed/traffic"
)

// A failover run has clients ask a Service while backends of it fail. The API server hears of that later, as it does of
// a machine that has died.
//
//	0 ── clients ask ── Event: backends fail ──────── Removal: the EndpointSlice is without them ────── End
//	                                                  or they are back

// FailoverOptions say what is compared.
type FailoverOptions struct {
	Program    []string // Fairlead
	Contenders []Contender
	Failures   []string // of Failures
	Health     []string // settings of Fairlead's field backendHealth
	Rate       float64  // connections a second of all clients
	Timeout    time.Duration
	// Event, Removal and End are from the beginning of the clients.
	Event, Removal, End time.Duration
	Say                 func(string)
}

// FailoverRow is what clients have seen of one run.
type FailoverRow struct {
	Contender string `json:"contender"`
	Failure   string `json:"failure"`
	Health    string `json:"health,omitempty"` // empty: the contender has none
	Attempts  int    `json:"attempts"`
	Failed    int    `json:"failed"`
	// WorstSecond is how many failed of those that began in one second.
	WorstSecond int `json:"worstSecond"`
	// LastFailure is the beginning of the last attempt that failed, in seconds after the event; 0: none did.
	LastFailure  float64 `json:"lastFailure"`
	AfterRemoval int     `json:"afterRemoval"` // failed, and began after the removal
	// WronglyEjected are backends that answered and got no connection for more than a second.
	WronglyEjected int            `json:"wronglyEjected"`
	Delayed        int            `json:"delayed"` // answered, after more than 0.9 s
	Errors         map[string]int `json:"errors,omitempty"`
	Lacking        string         `json:"lacking,omitempty"` // why there are no figures
}

// failure is a way in which backends fail.
type failure struct {
	name, does      string
	backends, fails int  // how many there are, and how many of them fail
	revives         bool // the API server does not remove them: they come back instead
	answers         bool // they do, though slowly
	begin, end      func(context.Context, *deployment, int) error
	every           time.Duration // begin and end alternate; 0: once
}

func failures() []failure {
	const flap = 3 * time.Second
	return []failure{
		{name: "silent", does: "one of three drops all packets", backends: 3, fails: 1, begin: silence},
		{name: "rst", does: "one of three has closed its port", backends: 3, fails: 1, begin: closePort},
		{name: "unplugged", does: "one of three has lost its network", backends: 3, fails: 1, begin: unplug},
		{name: "slow", does: "one of three answers after 400 ms", backends: 3, fails: 1, revives: true, answers: true,
			begin: slowDown, end: speedUp},
		{name: "flapping", does: "one of three is silent for 3 s, and answers for 3 s", backends: 3, fails: 1, revives: true,
			begin: silence, end: unsilence, every: flap},
		{name: "zone", does: "the two of one zone of two drop all packets", backends: 4, fails: 2, begin: silence},
		{name: "all", does: "all three drop all packets", backends: 3, fails: 3, revives: true,
			begin: silence, end: unsilence},
	}
}

// Failures are the names, each with what it does.
func Failures() (names, does []string) {
	for _, f := range failures() {
		names, does = append(names, f.name), append(does, f.does)
	}
	return names, does
}

// Failover has one contender after the other fail over. The error is one that ends the run.
func Failover(ctx context.Context, o FailoverOptions) (rows []FailoverRow, err error) {
	cluster := Cluster{Services: 10, Endpoints: 1, NodePorts: true}
	catalog, err := cluster.catalog()
	if err != nil {
		return nil, err
	}
	l := newLab(Options{Program: o.Program}, This)
	for _, c := range o.Contenders {
		for _, health := range o.health(c) {
			more, err := o.contender(ctx, l.newSite(ctx, withHealth(c, health), cluster, catalog), health)
			rows = append(rows, more...)
			if err != nil {
				return rows, err
			}
		}
	}
	return rows, nil
}

// health are the settings that a contender has.
func (o FailoverOptions) health(c Contender) []string {
	if c.Kind != Fairlead {
		return []string{""}
	}
	return o.Health
}

func withHealth(c Contender, health string) Contender {
	if health != "" && health != "off" {
		c.Args = append(slices.Clone(c.Args), "--backend-health="+health)
	}
	return c
}

func (o FailoverOptions) contender(ctx context.Context, s *Site, health string) (rows []FailoverRow, err error) {
	defer func() { err = errors.Join(err, s.close()) }()
	if s.failed == nil {
		s.failed = s.lacking(ctx)
	}
	for _, f := range failures() {
		if !slices.Contains(o.Failures, f.name) {
			continue
		}
		if o.Say != nil {
			o.Say(strings.Join(strings.Fields(s.Name+", "+f.name+" "+health), " "))
		}
		row := FailoverRow{Contender: s.Name, Failure: f.name, Health: health}
		failed := s.failed
		if failed == nil {
			failed = o.turn(ctx, s, f, &row)
		}
		if ctx.Err() != nil {
			return rows, context.Cause(ctx)
		}
		if failed != nil {
			row.Lacking = whyFailed(failed)
		}
		rows = append(rows, row)
	}
	return rows, nil
}

// whyFailed is one line.
func whyFailed(err error) string {
	if words := (kubernetes.LastWords{}); errors.As(err, &words) {
		return "its last words: " + words.Line()
	}
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}

func (o FailoverOptions) turn(ctx context.Context, s *Site, f failure, row *FailoverRow) (err error) {
	d, err := s.deploy(ctx, f.backends, f.backends)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.end()) }()
	happens := stages{of: d, how: f, begin: time.Now()}
	loads, err := o.ask(ctx, d)
	if err == nil {
		row.WronglyEjected, err = o.happen(ctx, &happens)
	}
	var all []traffic.Attempt
	for _, l := range loads {
		var r traffic.Result
		var ended error
		if err == nil {
			r, ended = l.Wait(ctx)
		} else {
			_, ended = l.Stop(context.WithoutCancel(ctx))
		}
		all, err = append(all, r.Each...), errors.Join(err, ended)
	}
	o.Removal = max(o.Removal, happens.told)
	o.tell(row, all)
	return err
}

// ask has clients in all places begin.
func (o FailoverOptions) ask(ctx context.Context, d *deployment) (loads []*traffic.Running, err error) {
	places := []testbed.Place{ClientPod, testbed.Node, testbed.Outside}
	rate := o.Rate / float64(len(places))
	for _, from := range places {
		to := d.target()
		if from == testbed.Outside {
			to = d.NodePort(d.number())
		}
		w, err := d.client(ctx, from)
		if err != nil {
			return loads, err
		}
		const spare = 50 // clients, beside those that wait for the dead
		l, err := w.Begin(ctx, traffic.Load{
			Targets: []netip.AddrPort{to}, Rate: rate, Concurrency: int(rate*o.Timeout.Seconds()) + spare,
			Duration: o.End, Timeout: o.Timeout, FIN: true, Each: true,
		})
		if err != nil {
			return loads, err
		}
		loads = append(loads, l)
	}
	return loads, nil
}

// happen has the backends fail and be removed, and returns when the clients end. It counts the backends that answered
// and were not asked.
func (o FailoverOptions) happen(ctx context.Context, s *stages) (wrong int, err error) {
	all := make([]backendState, s.how.backends)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for now := time.Duration(0); now < o.End; now = time.Since(s.begin) {
		switch {
		case now >= o.Removal:
			err = s.remove(ctx)
		case now >= o.Event:
			err = s.fail(ctx, now-o.Event)
		}
		if err != nil {
			return 0, err
		}
		for i := range all {
			served, err := s.of.replicas[i].Served(ctx)
			if err != nil {
				return 0, err
			}
			all[i].look(served[replicaPort].Connections, s.idle(i))
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
	for _, b := range all {
		if b.wrong {
			wrong++
		}
	}
	return wrong, nil
}

// backendState tells whether a backend that answers is left out.
type backendState struct {
	connections int64
	since       time.Time // when it was asked, or began to answer
	wrong       bool
}

func (b *backendState) look(connections int64, idle bool) {
	const patience = time.Second
	if now := time.Now(); connections != b.connections || idle || b.since.IsZero() {
		b.connections, b.since = connections, now
	} else if now.Sub(b.since) > patience {
		b.wrong = true
	}
}

// stages are what becomes of a deployment.
type stages struct {
	of               *deployment
	how              failure
	begin            time.Time
	failing, removed bool
	told             time.Duration // when the API server was, from the beginning
}

// fail has backends fail, a time after the event.
func (s *stages) fail(ctx context.Context, after time.Duration) error {
	return s.become(ctx, s.how.every == 0 || after/s.how.every%2 == 0)
}

// become has the backends fail, or answer again.
func (s *stages) become(ctx context.Context, failing bool) error {
	if failing == s.failing {
		return nil
	}
	s.failing = failing
	do := s.how.begin
	if !failing {
		do = s.how.end
	}
	for i := range s.how.fails {
		if err := do(ctx, s.of, i); err != nil {
			return err
		}
	}
	return nil
}

// remove has the EndpointSlice be without the backends that fail, or has these come back.
func (s *stages) remove(ctx context.Context) error {
	if s.removed {
		return nil
	}
	s.removed = true
	defer func() { s.told = time.Since(s.begin) }()
	if s.how.revives {
		return s.become(ctx, false)
	}
	var rest []discoveryv1.Endpoint
	for i := s.how.fails; i < s.how.backends; i++ {
		rest = append(rest, readyEndpoint(s.of.address(i)))
	}
	return s.of.become(rest...)
}

// idle reports whether nothing is to be expected of a backend.
func (s *stages) idle(i int) bool {
	return i < s.how.fails && (s.failing && !s.how.answers || s.removed && !s.how.revives)
}

// tell sums up.
func (o FailoverOptions) tell(row *FailoverRow, all []traffic.Attempt) {
	const late = 900 * time.Millisecond
	seconds := map[int]int{}
	row.Errors = map[string]int{}
	for _, a := range all {
		row.Attempts++
		if a.Error == "" {
			if a.Took > late {
				row.Delayed++
			}
			continue
		}
		row.Failed++
		row.Errors[a.Error]++
		seconds[int(a.At.Seconds())]++
		row.WorstSecond = max(row.WorstSecond, seconds[int(a.At.Seconds())])
		row.LastFailure = max(row.LastFailure, (a.At - o.Event).Seconds())
		if a.At > o.Removal {
			row.AfterRemoval++
		}
	}
}

// runAt runs a command in a backend's network.
func runAt(ctx context.Context, d *deployment, i int, command string) error {
	args := strings.Fields(command)
	out, err := d.Bed.Command(ctx, replicaName(i), args[0], args[1:]...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", command, err, strings.TrimSpace(string(out)))
	}
	return nil
}

func silence(ctx context.Context, d *deployment, i int) error {
	return runAt(ctx, d, i, "nft table inet silent { chain in { type filter hook input priority 0 ; policy drop ; } ; }")
}

func unsilence(ctx context.Context, d *deployment, i int) error {
	return runAt(ctx, d, i, "nft delete table inet silent")
}

func closePort(ctx context.Context, d *deployment, i int) error { return d.replicas[i].Shut(ctx) }

func unplug(ctx context.Context, d *deployment, i int) error {
	return runAt(ctx, d, i, "ip link set eth0 down")
}

// slowDown delays all packets, or, where the kernel has no netem, the answers.
func slowDown(ctx context.Context, d *deployment, i int) error {
	if runAt(ctx, d, i, "tc qdisc add dev eth0 root netem delay 400ms") == nil {
		return nil
	}
	return serveAnew(ctx, d, i, 400*time.Millisecond)
}

func speedUp(ctx context.Context, d *deployment, i int) error {
	if runAt(ctx, d, i, "tc qdisc del dev eth0 root") == nil {
		return nil
	}
	return serveAnew(ctx, d, i, 0)
}

func serveAnew(ctx context.Context, d *deployment, i int, delay time.Duration) error {
	err := d.replicas[i].Shut(ctx)
	return errors.Join(err, d.replicas[i].Serve(ctx, traffic.Server{Ports: []uint16{replicaPort}, Delay: delay}))
}
