package ebpf

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// Audit implements dataplane.Dataplane.
func (p *Plane) Audit(ctx context.Context, s *model.State, d dataplane.Depth) (r dataplane.Report, err error) {
	if r, err = p.auditBehind(ctx, s, d); err != nil {
		return dataplane.Report{}, err
	}
	own, err := p.auditOwn(s, d)
	if err != nil {
		return dataplane.Report{}, err
	}
	r.Drifts = append(r.Drifts, own...)
	used, err := p.usedUp()
	if err != nil {
		return dataplane.Report{}, fmt.Errorf("ebpf: %w", err)
	}
	r.UsedUp = append(r.UsedUp, used...)
	return r, nil
}

// A pacer says when Audit, which comes every second, looks at something that takes longer.
type pacer struct {
	next  time.Time
	pause time.Duration // before that
}

func (p *pacer) due() bool { return !time.Now().Before(p.next) }

// wait is called for each look. The pause before the next one doubles up to a limit.
func (p *pacer) wait(first, most time.Duration) {
	p.pause = min(max(2*p.pause, first), most)
	p.next = time.Now().Add(p.pause)
}

// Repair implements dataplane.Dataplane.
func (p *Plane) Repair(ctx context.Context, s *model.State, _ dataplane.Report) error {
	return p.Sync(ctx, s)
}

func (p *Plane) auditOwn(s *model.State, d dataplane.Depth) (drifts []dataplane.Drift, err error) {
	if p.tables == nil {
		return append(drifts, dataplane.Drift{Class: "programs", Object: "programs", Want: "those of this process"}), nil
	}
	drifts = slices.Concat(drifts, p.auditHooks(), p.auditMemory(), p.auditSet())
	if err := p.auditSocketSlots(); err != nil {
		return nil, fmt.Errorf("ebpf: slots of sockets: %w", err)
	}
	if err := errors.Join(p.auditReleased(s), p.auditStrays(s), p.auditAttached(), p.auditLoads(s)); err != nil {
		return nil, fmt.Errorf("ebpf: %w", err)
	}
	more, err := p.tables.audit(s, d == dataplane.Full)
	if err != nil {
		return nil, fmt.Errorf("ebpf: read tables: %w", err)
	}
	drifts = append(drifts, more...)
	more, err = p.auditPackets(s, d == dataplane.Full)
	if err != nil {
		return nil, fmt.Errorf("ebpf: %w", err)
	}
	return append(drifts, more...), nil
}

// auditBehind has the plane behind look.
func (p *Plane) auditBehind(ctx context.Context, s *model.State, d dataplane.Depth) (dataplane.Report, error) {
	switch {
	case p.behind == nil:
		return dataplane.Report{}, nil
	case p.serve == TC:
		return p.left.audit(ctx, s, d)
	}
	return p.behind.Audit(ctx, s, d)
}

// auditPackets finds devices without programs, and addresses that the programs have and the node has not. It tells of
// flows that could not be looked through.
func (p *Plane) auditPackets(s *model.State, all bool) ([]dataplane.Drift, error) {
	if p.serve != TC {
		return nil, p.auditStanding()
	}
	if err := p.sweep.failed(); err != nil {
		return nil, err
	}
	p.auditReserved()
	drifts, err := p.devices.drifts(all)
	if err != nil || !p.devices.takeMoved() {
		return drifts, err
	}
	want, err := p.devices.nodeAddrs()
	if have := p.devices.hiddenBehind(); err == nil && !maps.Equal(have, want) {
		drifts = append(drifts, dataplane.Drift{
			Class: "programs", Object: "addresses for source NAT", Have: have.String(), Want: want.String(),
		})
	}
	if err == nil && !p.knowsNode(s) {
		drifts = append(drifts, dataplane.Drift{Class: "rows", Object: "node addresses in allowed sources"})
	}
	return drifts, err
}

// auditHooks finds programs that are not attached as they should be.
func (p *Plane) auditHooks() (drifts []dataplane.Drift) {
	for _, hook := range p.hookNames() {
		d := dataplane.Drift{Class: "programs", Object: "program at hook " + hook, Want: "that of this process"}
		have := p.link(hook).program()
		if want, err := p.identities.of(p.sockets.Programs[hook]); err == nil && want == have {
			continue
		}
		if have != 0 {
			d.Have = fmt.Sprintf("program %d", have)
		}
		drifts = append(drifts, d)
	}
	return drifts
}

// auditMemory finds maps that the next process would not find.
func (p *Plane) auditMemory() (drifts []dataplane.Drift) {
	for _, name := range slices.Sorted(maps.Keys(p.memory)) {
		path := p.memoryPath(name)
		if _, err := os.Stat(path); err != nil {
			drifts = append(drifts, dataplane.Drift{Class: "pins", Object: "pin " + path, Want: "map " + name})
		}
	}
	return drifts
}

// auditSet finds tables that another program has removed from the programs.
func (p *Plane) auditSet() (drifts []dataplane.Drift) {
	for _, name := range p.sets.lost(p.tables.ids) {
		drifts = append(drifts, dataplane.Drift{Class: "programs", Object: "table " + name, Want: "that of this process"})
	}
	return drifts
}
