package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/memory"
	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// script is a Source that delivers what a test puts into its channel.
type script struct {
	batches chan service.Batch
	err     chan error
}

func (s script) Next(ctx context.Context) (service.Batch, error) {
	select {
	case b := <-s.batches:
		return b, nil
	case err := <-s.err:
		return service.Batch{}, err
	case <-ctx.Done():
		return service.Batch{}, ctx.Err()
	}
}

func (script) Close() error { return nil }

var errBroken = errors.New("broken")

// kernel notes what is called of its planes, in order: sync, apply, audit, remove, close.
type kernel struct {
	memory.Kernel
	calls called
}

// called are the names of methods.
type called struct {
	sync.Mutex
	names []string
}

func (c *called) add(name string) {
	c.Lock()
	defer c.Unlock()
	c.names = append(c.names, name)
}

// Calls are those so far.
func (k *kernel) Calls() []string {
	k.calls.Lock()
	defer k.calls.Unlock()
	return slices.Clone(k.calls.names)
}

// String is the rows in canonical text form.
func (k *kernel) String() (text string) {
	k.Do(func(rows *model.State) { text = rows.String() })
	return text
}

// New is a dataplane.New.
func (k *kernel) New(c dataplane.Config) (dataplane.Dataplane, error) {
	p, err := k.Kernel.New(c)
	return noted{p, &k.calls}, err
}

// noted is a plane whose calls are noted.
type noted struct {
	dataplane.Dataplane
	calls *called
}

func (p noted) Sync(ctx context.Context, s *model.State) error {
	p.calls.add("sync")
	return p.Dataplane.Sync(ctx, s)
}

func (p noted) Apply(ctx context.Context, s *model.State, c model.Change) error {
	p.calls.add("apply")
	return p.Dataplane.Apply(ctx, s, c)
}

func (p noted) Audit(ctx context.Context, s *model.State, d dataplane.Depth) (dataplane.Report, error) {
	p.calls.add("audit")
	return p.Dataplane.Audit(ctx, s, d)
}

// Repair is Sync.
func (p noted) Repair(ctx context.Context, s *model.State, _ dataplane.Report) error {
	return p.Sync(ctx, s)
}

func (p noted) Remove(ctx context.Context) error {
	p.calls.add("remove")
	return p.Dataplane.Remove(ctx)
}

func (p noted) Close() error {
	p.calls.add("close")
	return p.Dataplane.Close()
}

// rig is an Engine with both ends in the test's hand.
type rig struct {
	t      *testing.T
	script script
	kernel *kernel
	want   *service.Table // fed the same batches
	state  *model.State   // of want
	log    bytes.Buffer
	engine *Engine
	cancel context.CancelFunc
	result chan error

	mu    sync.Mutex
	fault func(operation string) error
}

func newRig(t *testing.T) *rig {
	return &rig{
		t:      t,
		script: script{make(chan service.Batch, 100), make(chan error, 1)},
		kernel: &kernel{},
		want:   newTable(t),
	}
}

func newTable(t *testing.T) *service.Table {
	table, err := service.NewTable(service.Options{NodeName: "node", NodeIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}})
	if err != nil {
		t.Fatal(err)
	}
	return table
}

func (r *rig) setFault(f func(string) error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fault = f
}

func (r *rig) fail(operation string) error {
	r.mu.Lock()
	f := r.fault
	r.mu.Unlock()
	if f == nil {
		return nil
	}
	return f(operation)
}

// start runs an Engine; several may follow each other on one Kernel.
func (r *rig) start(change func(*Options)) {
	plane, err := r.kernel.New(dataplane.Config{Fault: r.fail})
	if err != nil {
		r.t.Fatal(err)
	}
	o := Options{Source: r.script, Table: newTable(r.t), Plane: plane, Log: slog.New(slog.NewTextHandler(&r.log, nil))}
	if change != nil {
		change(&o)
	}
	r.engine, r.result = New(o), make(chan error, 1)
	ctx, cancel := context.WithCancel(r.t.Context())
	r.cancel = cancel
	go func() { r.result <- r.engine.Run(ctx) }()
}

// stop ends the Engine, which must not complain.
func (r *rig) stop() {
	r.t.Helper()
	r.cancel()
	if err := <-r.result; err != nil {
		r.t.Error("Run:", err)
	}
}

func (r *rig) send(b service.Batch) {
	r.state, _, _ = r.want.Update(b)
	r.script.batches <- b
}

// converged waits (in fake time) and compares the kernel with what it should hold.
func (r *rig) converged() {
	r.t.Helper()
	bubble.Pass(time.Minute)
	if got, want := r.kernel.String(), r.state.String(); got != want || want == "" {
		r.t.Fatalf("kernel:\n%s\nwant:\n%s", got, want)
	}
}

// web is a Service and its endpoints.
func web(i int, endpoints ...string) service.Batch {
	name := service.Name{Namespace: "default", Name: fmt.Sprint("web-", i)}
	s := &service.Service{
		Name:       name,
		ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})},
		Ports:      []service.Port{{Name: "http", Protocol: model.TCP, Port: 80}},
	}
	l := &service.Slice{Name: name, Service: name.Name, Ports: []service.SlicePort{{Name: "http", Protocol: model.TCP, Port: 8080}}}
	for _, e := range endpoints {
		l.Endpoints = append(l.Endpoints, service.Endpoint{Addr: netip.MustParseAddr(e), Ready: true, Serving: true, Weight: 1})
	}
	return service.Batch{
		Services: service.One(name, s),
		Slices:   service.One(name, l),
	}
}

func gone(i int) service.Batch {
	name := service.Name{Namespace: "default", Name: fmt.Sprint("web-", i)}
	return service.Batch{
		Services: service.One[service.Service](name, nil),
		Slices:   service.One[service.Slice](name, nil),
	}
}

func TestEngine_nothingBeforeTheFirstBatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.kernel.Do(func(s *model.State) { s.Guards[netip.MustParsePrefix("10.96.0.0/16")] = model.Drop })
		r.start(nil)
		for range 10 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
			if err := r.engine.Do(ctx, func(context.Context, View) error { return nil }); !errors.Is(err, context.DeadlineExceeded) {
				t.Fatal(err)
			}
			cancel()
		}
		if calls := r.kernel.Calls(); calls != nil || r.engine.Healthy() {
			t.Fatalf("calls %v, healthy %v", calls, r.engine.Healthy())
		}
		r.send(web(1, "10.244.1.2"))
		r.converged()
		r.stop()
	})
}

// While the first objects are still to come, the plane reads what an earlier process has left.
func TestEngine_readsAhead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.start(func(o *Options) { o.AuditInterval, o.Plane = 10*time.Hour, reader{o.Plane, &r.kernel.calls} })
		synctest.Wait()
		if got := r.kernel.Calls(); !slices.Equal(got, []string{"read ahead"}) {
			t.Error("before the first objects:", got)
		}
		r.send(web(1, "10.244.1.2"))
		r.converged()
		r.stop()
		if got := r.kernel.Calls(); !slices.Equal(got, []string{"read ahead", "sync"}) {
			t.Error(got)
		}
	})
}

// reader is a plane of which it is noted when it is to read ahead.
type reader struct {
	dataplane.Dataplane
	calls *called
}

func (p reader) ReadAhead(context.Context) { p.calls.add("read ahead") }

func TestEngine_syncOnceThenApply(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.start(func(o *Options) { o.AuditInterval = 10 * time.Hour })
		r.send(web(1, "10.244.1.2"))
		r.converged()
		for i, b := range []service.Batch{web(2, "10.244.1.3"), {}, web(1), gone(2)} {
			r.send(b)
			bubble.Pass(time.Second)
			if s := r.engine.Status(); !s.WaitingSince.IsZero() || s.LastProgrammed.IsZero() {
				t.Fatalf("batch %d: %+v", i, s)
			}
		}
		r.converged()
		r.stop()
		if got := r.kernel.Calls(); !slices.Equal(got, []string{"sync", "apply", "apply", "apply"}) {
			t.Fatal(got)
		}
	})
}

func TestEngine_afterAnErrorSync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.start(func(o *Options) { o.AuditInterval = 10 * time.Hour })
		r.send(web(1, "10.244.1.2"))
		r.converged()
		r.setFault(func(operation string) error {
			if operation == "frontend set" {
				r.setFault(nil)
				return errBroken
			}
			return nil
		})
		r.send(web(2, "10.244.1.3"))
		synctest.Wait()
		if s := r.engine.Status(); s.Failures != 1 || s.WaitingSince.IsZero() || !strings.Contains(s.Error, "frontend set: broken") {
			t.Fatalf("%+v", s)
		}
		r.converged()
		r.stop()
		if got := r.kernel.Calls(); !slices.Equal(got, []string{"sync", "apply", "sync"}) {
			t.Fatal(got)
		}
	})
}

func TestEngine_backsOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		var tries []time.Time
		r.setFault(func(string) error {
			tries = append(tries, time.Now())
			return errBroken
		})
		r.start(nil)
		r.send(web(1, "10.244.1.2"))
		bubble.Pass(10 * time.Second)
		for i := range 20 { // changes do not hurry it
			r.send(web(i+2, "10.244.1.2"))
		}
		bubble.Pass(time.Hour)
		r.setFault(nil)
		synctest.Wait()
		var waits []time.Duration
		for i := range tries[1:] {
			waits = append(waits, tries[i+1].Sub(tries[i]))
		}
		want := []time.Duration{100 * time.Millisecond, 200 * time.Millisecond, 400 * time.Millisecond, 800 * time.Millisecond,
			1600 * time.Millisecond, 3200 * time.Millisecond, 6400 * time.Millisecond, 12800 * time.Millisecond,
			25600 * time.Millisecond, 30 * time.Second, 30 * time.Second}
		if !slices.Equal(waits[:len(want)], want) {
			t.Fatal(waits)
		}
		if r.engine.Healthy() {
			t.Fatal("healthy")
		}
		r.converged()
		if s := r.engine.Status(); !r.engine.Healthy() || s.Failures != 0 || s.Error != "" {
			t.Fatalf("%+v", s)
		}
		r.stop()
	})
}

// run is a short life with every kind of change.
func (r *rig) run() {
	for i, b := range []service.Batch{
		web(1, "10.244.1.2", "10.244.2.2"), web(2, "10.244.1.3"), web(1, "10.244.1.2"), web(3),
		{ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}}, gone(2), web(3, "10.244.2.9"), web(1),
	} {
		r.send(b)
		if i%2 == 0 {
			bubble.Pass(time.Duration(i) * 300 * time.Millisecond)
		}
	}
}

func TestEngine_anyCallMayFail(t *testing.T) {
	calls := 0
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.setFault(func(string) error { calls++; return nil })
		r.start(nil)
		r.run()
		bubble.Pass(10 * time.Second)
		r.stop()
	})
	if calls < 20 {
		t.Fatalf("only %d calls", calls)
	}
	for k := 1; k <= calls; k++ {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t)
			n := 0
			r.setFault(func(string) error {
				if n++; n == k {
					return errBroken
				}
				return nil
			})
			r.start(nil)
			r.run()
			r.converged()
			r.stop()
		})
	}
}

func TestEngine_aTenthFails(t *testing.T) {
	random := rand.New(rand.NewPCG(sample.Seed(t), 0))
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.setFault(func(string) error {
			if random.IntN(10) == 0 {
				return errBroken
			}
			return nil
		})
		r.start(nil)
		for range 20 {
			r.run()
		}
		bubble.Pass(time.Hour)
		r.setFault(nil)
		r.converged()
		r.stop()
	})
}

func TestEngine_repairsDrift(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.start(nil)
		r.send(web(1, "10.244.1.2"))
		r.converged()
		for range 3 { // the other program insists
			r.kernel.Do(func(s *model.State) { clear(s.Frontends) })
			bubble.Pass(auditInterval)
			if got := r.kernel.String(); got != r.state.String() {
				t.Fatalf("not repaired after a second:\n%s", got)
			}
		}
		r.stop()
		if n := strings.Count(r.log.String(), "another program changed"); n != 1 || r.engine.Status().Drifts != 3 {
			t.Fatalf("logged %d times, %+v\n%s", n, r.engine.Status(), r.log.String())
		}
	})
}

// slowAudit takes its time, the first so many times.
type slowAudit struct {
	dataplane.Dataplane
	took  time.Duration
	times int
}

func (p *slowAudit) Audit(ctx context.Context, s *model.State, d dataplane.Depth) (dataplane.Report, error) {
	if p.times--; p.times >= 0 {
		bubble.Work(p.took)
	}
	return p.Dataplane.Audit(ctx, s, d)
}

func TestEngine_slowAuditsAreRare(t *testing.T) {
	for _, c := range []struct {
		took     time.Duration
		times    int
		min, max int // audits in an hour
	}{
		{0, 0, 7000, 7210},
		{time.Second, 1, 7000, 7210},                // a single one delays nothing
		{200 * time.Millisecond, 1 << 30, 140, 152}, // 0.8 % of a core, and what was lent
		{10 * time.Second, 1 << 30, 80, 95},         // not rarer than this
	} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t)
			r.start(func(o *Options) { o.Plane = &slowAudit{o.Plane, c.took, c.times} })
			r.send(web(1, "10.244.1.2"))
			bubble.Pass(time.Hour)
			r.stop()
			if n := len(r.kernel.Calls()); n < c.min || n > c.max {
				t.Errorf("%d audits in an hour, want %d to %d, if %d of them take %v", n, c.min, c.max, c.times, c.took)
			}
		})
	}
}

// stuckPlane waits for something that never comes.
type stuckPlane struct {
	dataplane.Dataplane
	stuck atomic.Bool
}

func (p *stuckPlane) Sync(ctx context.Context, s *model.State) error {
	if p.stuck.Load() {
		<-ctx.Done()
		return ctx.Err()
	}
	return p.Dataplane.Sync(ctx, s)
}

func (p *stuckPlane) Repair(ctx context.Context, s *model.State, _ dataplane.Report) error {
	return p.Sync(ctx, s)
}

func (p *stuckPlane) Audit(ctx context.Context, s *model.State, d dataplane.Depth) (dataplane.Report, error) {
	if p.stuck.Load() {
		<-ctx.Done()
		return dataplane.Report{}, ctx.Err()
	}
	return p.Dataplane.Audit(ctx, s, d)
}

// Another program may lock the machine's iptables for good. While an audit waits for the lock no change is taken in.
func TestEngine_stuckAuditShows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, p := newRig(t), &stuckPlane{}
		r.start(func(o *Options) { p.Dataplane, o.Plane = o.Plane, p })
		r.send(web(1))
		r.converged()
		p.stuck.Store(true)
		bubble.Pass(2 * healthTimeout)
		if s := r.engine.Status(); r.engine.Healthy() || s.AuditUnfinishedSince.IsZero() || s.Failures > 0 {
			t.Errorf("the kernel cannot be compared, and the status is %+v", s)
		}
		r.stop()
	})
}

func TestEngine_stopLeavesTheKernel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.start(nil)
		r.send(web(1, "10.244.1.2"))
		r.converged()
		r.stop()
		if got := r.kernel.String(); got != r.state.String() {
			t.Fatal(got)
		}
		if err := r.engine.Do(t.Context(), nil); !errors.Is(err, ErrStopped) {
			t.Fatal(err)
		}
	})
}

func TestEngine_endsMidway(t *testing.T) {
	for k := range 12 {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t)
			n := 0
			r.setFault(func(string) error {
				if n++; n == k {
					r.cancel()
				}
				return nil
			})
			r.start(nil)
			r.run()
			bubble.Pass(time.Minute)
			r.stop()
			r.setFault(nil)
			close(r.script.batches) // the rest
			for range r.script.batches {
			}
			r.script.batches = make(chan service.Batch, 1)
			r.start(nil)
			r.want = newTable(t)
			r.send(web(7, "10.244.1.7"))
			r.converged()
			r.stop()
		})
	}
}

func TestEngine_do(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.start(func(o *Options) { o.AuditInterval = 10 * time.Hour })
		r.send(web(1, "10.244.1.2"))
		var asking sync.WaitGroup
		for i := range 20 {
			asking.Go(func() {
				err := r.engine.Do(t.Context(), func(_ context.Context, v View) error {
					if len(v.State.Pools) == 0 || v.Table == nil || v.Plane == nil {
						return errors.New("the view is not complete")
					}
					return fmt.Errorf("%d: %w", i, errBroken)
				})
				if !errors.Is(err, errBroken) {
					t.Error(err)
				}
			})
		}
		asking.Wait() // no time has to pass for that
		r.send(web(2, "10.244.1.3"))
		r.converged()
		r.stop()
	})
}

func TestEngine_doGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.start(nil)
		r.send(web(1, "10.244.1.2"))
		r.converged()
		r.setFault(func(string) error { bubble.Work(time.Minute); return nil }) // the loop is busy
		r.send(web(2, "10.244.1.2"))
		synctest.Wait()
		called := false
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err := r.engine.Do(ctx, func(context.Context, View) error { called = true; return nil })
		bubble.Pass(time.Hour)
		r.setFault(nil)
		r.stop()
		if !errors.Is(err, context.DeadlineExceeded) || called {
			t.Fatalf("%v, called %v", err, called)
		}
	})
}

func TestEngine_once(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.send(web(1, "10.244.1.2"))
		r.start(func(o *Options) { o.Once = true })
		if err := <-r.result; err != nil || r.kernel.String() != r.state.String() {
			t.Fatalf("%v\n%s", err, r.kernel)
		}
		r.setFault(func(string) error { return errBroken })
		r.send(web(1, "10.244.1.2"))
		r.start(func(o *Options) { o.Once = true })
		if err := <-r.result; !errors.Is(err, errBroken) {
			t.Fatal(err)
		}
	})
}

func TestEngine_sourceFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.start(nil)
		r.send(web(1, "10.244.1.2"))
		r.converged()
		r.script.err <- errBroken
		if err := <-r.result; !errors.Is(err, errBroken) {
			t.Fatal(err)
		}
	})
}

func TestEngine_reportsProblems(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.start(nil)
		b := web(1, "10.244.1.2")
		for i := range 2 * maxReported {
			b.Problems = append(b.Problems, service.Problem{Object: fmt.Sprint("Service default/", i), Reason: "bad"})
		}
		r.send(b)
		r.converged()
		r.stop()
		if n := strings.Count(r.log.String(), "level=WARN"); n != maxReported+1 || !strings.Contains(r.log.String(), "count=100") {
			t.Fatalf("%d lines\n%s", n, r.log.String())
		}
	})
}

// shows looks which objects the status names.
func (r *rig) shows(want string) {
	r.t.Helper()
	bubble.Pass(time.Second)
	var objects []string
	for _, p := range r.engine.Status().Problems {
		objects = append(objects, p.Object)
	}
	if got := strings.Join(objects, ", "); got != want {
		r.t.Errorf("the status has %q, should have %q", got, want)
	}
}

// A problem stays in the status while it lasts, though its object changes, or another problem of it is over. Neither
// Source nor Table tells of it again.
func TestEngine_problemsLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.start(nil)
		b := web(1, "10.244.1.2")
		b.Problems = []service.Problem{{Object: "Service default/web-1", Reason: "bad"}, {Object: "EndpointSlice default/web-1", Reason: "bad"}}
		r.send(b)
		r.shows("EndpointSlice default/web-1, Service default/web-1")
		b = web(1, "10.244.1.3")
		b.Services[0].Is.Ports[0].Port = 8080
		r.send(b)
		r.shows("EndpointSlice default/web-1, Service default/web-1")
		own := func(ports ...uint16) service.Batch {
			b := web(2)
			s := b.Services[0].Is
			s.ClusterIPs, s.Ports = []netip.Addr{netip.MustParseAddr("192.0.2.1")}, nil // the node's
			for _, port := range ports {
				s.Ports = append(s.Ports, service.Port{Name: fmt.Sprint(port), Protocol: model.TCP, Port: port})
			}
			return b
		}
		r.send(own(80, 81))
		r.shows("EndpointSlice default/web-1, Service default/web-1, Service default/web-2")
		node := func(ip string) *service.Node {
			return &service.Node{Name: "node", Eligible: true, IPs: []netip.Addr{netip.MustParseAddr(ip)}}
		}
		b = own(80, 81)
		b.Services[0].Is.ClusterIPs = append(b.Services[0].Is.ClusterIPs, netip.MustParseAddr("192.0.2.2"))
		b.Node = node("192.0.2.2")
		r.send(b)
		r.shows("EndpointSlice default/web-1, Service default/web-1, Service default/web-2")
		r.send(service.Batch{Node: node("192.0.2.3")})
		r.shows("EndpointSlice default/web-1, Service default/web-1, Service default/web-2")
		r.send(own(81))
		r.shows("EndpointSlice default/web-1, Service default/web-1, Service default/web-2")
		r.send(service.Batch{Resolved: []string{"Service default/web-1", "EndpointSlice default/web-1"}})
		r.shows("Service default/web-2")
		r.send(web(2))
		r.shows("")
		r.stop()
	})
}

// A problem leaves the status when its Source says that it is over, or when another Source takes over.
func TestEngine_problemsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.start(nil)
		b := web(1, "10.244.1.2")
		b.Problems = []service.Problem{{Object: "a.yaml:21", Reason: "bad"}, {Object: "Service default/web-1", Reason: "bad"}}
		r.send(b)
		r.shows("a.yaml:21, Service default/web-1")
		r.send(service.Batch{Resolved: []string{"a.yaml:21"}, Problems: []service.Problem{{Object: "a.yaml:22", Reason: "bad"}}})
		r.shows("a.yaml:22, Service default/web-1")
		r.send(service.Batch{Resolved: []string{"Service default/web-1"}})
		r.shows("a.yaml:22")
		next := script{make(chan service.Batch, 1), make(chan error, 1)}
		next.batches <- web(1, "10.244.1.2")
		if err := r.engine.Replace(t.Context(), Parts{Source: next, Table: newTable(t)}); err != nil {
			t.Error(err)
		}
		r.shows("")
		r.stop()
		if n := strings.Count(r.log.String(), `level=INFO msg="problem is over" object=`); n != 2 {
			t.Errorf("%d lines say that a problem is over:\n%s", n, r.log.String())
		}
	})
}

// usedUpPlane has shares that clients have used up.
type usedUpPlane struct {
	dataplane.Dataplane
	of *atomic.Pointer[[]dataplane.Share]
}

func (p usedUpPlane) Audit(ctx context.Context, s *model.State, d dataplane.Depth) (dataplane.Report, error) {
	r, err := p.Dataplane.Audit(ctx, s, d)
	if of := p.of.Load(); of != nil {
		r.UsedUp = *of
	}
	return r, err
}

// A namespace whose clients have used up a share is named once, for as long as that lasts. Its name is in the status and
// in the log, and the Observer, which makes Events and metrics of it, gets it.
func TestEngine_usedUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		var of atomic.Pointer[[]dataplane.Share]
		var seen rounds
		r.start(func(o *Options) { o.Plane, o.Observer = usedUpPlane{o.Plane, &of}, &seen })
		r.send(web(1, "10.244.1.2"))
		expect := func(what, want string, told int) {
			t.Helper()
			bubble.Pass(time.Minute)
			var shown []string
			for _, p := range r.engine.Status().Problems {
				shown = append(shown, p.Error())
			}
			if got := strings.Join(shown, "; "); got != want {
				t.Errorf("%s: the status has %q, should have %q", what, got, want)
			}
			n := 0
			for _, round := range seen.all() {
				n += len(round.Problems)
			}
			if n != told {
				t.Errorf("%s: the Observer was told %d times, not %d", what, n, told)
			}
		}
		r.send(web(1, "10.244.1.2"))
		expect("at first", "", 0)
		const text = "Namespace evil: its clients have used up its share of %s on this node; the least recently used ones are removed"
		of.Store(&[]dataplane.Share{{Namespace: "evil", Of: "flows"}})
		expect("one share", fmt.Sprintf(text, "flows"), 1)
		r.send(web(1, "10.244.1.3"))
		expect("a change meanwhile", fmt.Sprintf(text, "flows"), 1)
		of.Store(&[]dataplane.Share{{Namespace: "evil", Of: "flows"}, {Namespace: "evil", Of: "sessions"}})
		expect("two shares", fmt.Sprintf(text, "flows and sessions"), 2)
		of.Store(nil)
		expect("none any more", "", 2)
		r.stop()
		if log := r.log.String(); strings.Count(log, "msg=problem object=\"Namespace evil\"") != 2 ||
			strings.Count(log, "problem is over\" object=\"Namespace evil\"") != 1 {
			t.Errorf("the log:\n%s", log)
		}
	})
}

// partialPlane has rows that it cannot put in force.
type partialPlane struct {
	dataplane.Dataplane
	broken *atomic.Bool
	calls  *atomic.Int64 // of Sync
}

func (p partialPlane) state(err error) error {
	if err == nil && p.broken.Load() {
		err = fmt.Errorf("%w: %w", dataplane.ErrPartial, errBroken)
	}
	return err
}

func (p partialPlane) Sync(ctx context.Context, s *model.State) error {
	p.calls.Add(1)
	return p.state(p.Dataplane.Sync(ctx, s))
}

func (p partialPlane) Repair(ctx context.Context, s *model.State, _ dataplane.Report) error {
	return p.Sync(ctx, s)
}

func (p partialPlane) Apply(ctx context.Context, s *model.State, c model.Change) error {
	return p.state(p.Dataplane.Apply(ctx, s, c))
}

// A row that is refused after a long time of success is tried again ever more rarely, too.
func TestEngine_partialLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		var broken atomic.Bool
		var calls atomic.Int64
		r.start(func(o *Options) { o.Plane = partialPlane{o.Plane, &broken, &calls} })
		r.send(web(1, "10.244.0.1"))
		bubble.Pass(2 * calm)
		broken.Store(true)
		before := calls.Load()
		r.send(web(2, "10.244.0.1"))
		bubble.Pass(100 * time.Second)
		if n := calls.Load() - before; n < 3 || n > 20 {
			t.Errorf("%d calls of Sync in 100 s", n)
		}
		r.stop()
	})
}

// A row that cannot be in force holds up neither the changes of others nor /healthz, and is tried again.
func TestEngine_partial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		var broken atomic.Bool
		var calls atomic.Int64
		broken.Store(true)
		r.start(func(o *Options) { o.Plane = partialPlane{o.Plane, &broken, &calls} })
		r.send(web(1, "10.244.0.1"))
		bubble.Pass(10 * time.Second) // by then a failed engine waits seconds for its next try
		for i := 2; i < 5; i++ {
			r.send(web(i, "10.244.0.1"))
			synctest.Wait()
			if got, want := r.kernel.String(), r.state.String(); got != want {
				t.Errorf("kernel:\n%s\nwant at once:\n%s", got, want)
			}
		}
		before := calls.Load()
		for i := range 1000 { // changes that come all the time do not put the retry off
			r.send(web(5, fmt.Sprintf("10.244.1.%d", i%200+1)))
			bubble.Pass(100 * time.Millisecond)
		}
		if n := calls.Load() - before; n < 3 {
			t.Errorf("%d calls of Sync in 100 s of changes", n)
		}
		if s := r.engine.Status(); !r.engine.Healthy() || s.Failures == 0 || !strings.Contains(s.Error, errBroken.Error()) {
			t.Errorf("the status is %+v; want it healthy, with the error", s)
		}
		if n := calls.Load(); n < 3 || n > 20 {
			t.Errorf("%d calls of Sync; want a few, ever more rarely", n)
		}
		broken.Store(false)
		bubble.Pass(maxBackoff)
		if s := r.engine.Status(); s.Failures != 0 || s.Error != "" {
			t.Errorf("when the row is in force: %+v", s)
		}
		r.converged()
		r.stop()
	})
}
