package userspace

import (
	"context"
	"errors"
	"fmt"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/subset"
	"fairlead.dev/fairlead/model"
)

// Where the kernel has no nf_tables, another data plane translates. Each of its rows leads to this process, to the port
// for its scope. It decides as ever what is refused, dropped and allowed.
//
//	frontend … forward default/web cluster ──► frontend … forward process ─ backend 192.0.0.70:17985 ─► accept
//
// It cannot have the process's own connections leave as their clients.

// process names the pools of another plane's rows whose backend is this process: Local for those of scope Internal.
func process(scope model.Scope, v6 bool) model.PoolID {
	return model.PoolID{Service: "fairlead/process", Local: scope == model.Internal, V6: v6}
}

// ported is the origin whose port rows of a scope lead to. That decides which row is found for the client again.
func ported(scope model.Scope) origin {
	if scope == model.Internal {
		return fromPod
	}
	return elsewhere
}

// translates reports whether another plane has the rules.
func (p *Plane) translates() bool { return p.options.Redirect == ByPlane }

// toProcess implements subset.Row for the other plane: a row that can be served leads to the process.
func (p *Plane) toProcess(_ *model.State, key model.Key, f model.Frontend) (model.Frontend, bool) {
	if p.unable(key, f) != nil {
		return f, false
	}
	if f.Verdict == model.Forward {
		f.Pool, f.SNAT = process(key.Scope, key.Addr.Is6()), model.Never
	}
	return f, true
}

// byProcess is a State whose pools are those of the process.
func (p *Plane) byProcess(s *model.State) *model.State {
	out := *s
	out.Pools = map[model.PoolID]model.Pool{}
	for i, l := range p.listening {
		for _, scope := range []model.Scope{model.Any, model.Internal} {
			out.Pools[process(scope, i == 1)] = model.Pool{Backends: []model.Backend{{
				Addr: ownAddress(i == 1), Port: l.redirectPorts[ported(scope)], Local: true, Weight: 1,
			}}}
		}
	}
	return &out
}

// syncOver is Sync where another plane has the rules.
func (p *Plane) syncOver(ctx context.Context, s *model.State) error {
	p.led = nil
	p.begin()
	if err := p.serve(s); err != nil {
		return err
	}
	served, partial := p.able(s)
	p.proxy.Rows.Replace(served)
	p.proxy.Expel(nil)
	p.learned.TakeIn(p.config.Log, p.proxy.Rows.Taker())
	if err := p.route(); err != nil {
		return err
	}
	led := subset.Of(p.byProcess(s), p.toProcess)
	if p.phase == waiting {
		p.led = led
		return partial
	}
	err := p.over.Sync(ctx, led.State)
	if dataplane.Known(err) {
		p.led = led
	}
	return p.ofOver(partial, err)
}

func (p *Plane) ofOver(partial, err error) error {
	if err != nil {
		err = fmt.Errorf("userspace: %w", err)
	}
	return errors.Join(partial, err)
}

// applyOver is Apply where another plane has the rules.
func (p *Plane) applyOver(ctx context.Context, s *model.State, c model.Change) error {
	if p.led == nil || p.proxy == nil {
		return errors.New("userspace: the kernel's content is not known; Sync first")
	}
	led := p.led.Change(p.byProcess(s), c)
	c, partial := p.ableChange(c)
	p.proxy.Rows.Change(c)
	var err error
	if p.phase != waiting {
		err = p.over.Apply(ctx, p.led.State, led)
	}
	if !dataplane.Known(err) {
		p.led = nil
	}
	p.proxy.Expel(&c)
	return p.ofOver(partial, err)
}

// auditOver is Audit where another plane has the rules.
func (p *Plane) auditOver(ctx context.Context, d dataplane.Depth) (r dataplane.Report, err error) {
	if p.led == nil {
		return r, errors.New("userspace: the kernel's content is not known; Sync first")
	}
	if p.phase == waiting {
		return r, nil
	}
	r, err = p.over.Audit(ctx, p.led.State, d)
	r.Plan = nil // Sync of this plane lays out what the other one is to hold
	return r, p.ofOver(nil, err)
}

// enterOver is Enter where another plane has the rules: it has none before.
func (p *Plane) enterOver(ctx context.Context) error {
	if p.led == nil {
		return errors.New("userspace: the kernel's content is not known; Sync first")
	}
	p.phase = serving
	partial := p.over.Sync(ctx, p.led.State)
	if !dataplane.Known(partial) {
		return p.ofOver(partial, nil)
	}
	r, err := p.over.Audit(ctx, p.led.State, dataplane.Full)
	if err == nil && partial == nil && len(r.Drifts) > 0 {
		err = fmt.Errorf("the rules of iptables are not what they should be: %s", r.Drifts[0])
	}
	return p.ofOver(partial, err)
}

// drainOver is Drain where another plane has the rules. The plane in force removes them, unless they are its own:
// connection tracking translates what it knows without any.
func (p *Plane) drainOver(s *model.State) {
	p.led, p.phase = nil, draining
	p.proxy.Rows.Replace(s)
	p.proxy.Expel(nil)
}

// removeOver is Remove where another plane has the rules.
func (p *Plane) removeOver(ctx context.Context) error {
	p.led = nil
	p.endProxy()           // before the rules: clients are to hear of it
	if !p.phase.yields() { // else they may be another's
		if err := p.over.Remove(ctx); err != nil {
			return p.ofOver(nil, err)
		}
	}
	var errs []error
	for _, family := range families() {
		errs = append(errs, p.routes.remove(family))
	}
	return p.ofOver(nil, errors.Join(errs...))
}
