package ebpf

import (
	"errors"
	"fmt"
	"time"
)

// Packets are served by the plane behind, where programs at devices have served them before. The flows that these have
// made go on through such programs, which have no rows:
//
//	Sync, the first time ─► are there flows? ─► programs whose tables are empty: they know the flows, and make none
//	Audit ────────────────► are there still? ─ no ─► all goes that is for packets
//
// It is what drainLeft does when the whole plane is to go.

// standing are programs that serve flows and nothing else.
type standing struct {
	none *sets // in which there are no tables
	pacer
}

const maxStandingPause = 30 * time.Second

// stand finds out whether there are flows, when a process begins.
func (p *Plane) stand() error {
	if p.serve == TC || p.memory != nil || p.standing != nil {
		return nil
	}
	flows, err := p.countFlows()
	if err != nil {
		return fmt.Errorf("count flows: %w", err)
	}
	if flows == 0 {
		return nil
	}
	none, err := newSets()
	if err != nil {
		return fmt.Errorf("tables without rows: %w", err)
	}
	p.standing = &standing{none: none}
	p.standing.wait(time.Second, maxStandingPause)
	p.say("connections through programs at devices stay open", "connections", flows)
	return nil
}

// auditStanding removes what is for packets when no flow needs it any more.
func (p *Plane) auditStanding() error {
	if p.standing == nil || !p.standing.due() {
		return nil
	}
	flows, err := p.countFlows()
	if err != nil {
		return fmt.Errorf("count flows: %w", err)
	}
	if flows > 0 {
		p.divert()
		p.standing.wait(time.Second, maxStandingPause)
		return nil
	}
	p.closePackets()
	p.closeStanding()
	for _, name := range flowMaps() {
		if name == packetsMapTraffic && p.countsSockets() {
			continue
		}
		p.memory[name].Close()
		delete(p.memory, name)
	}
	p.endDivert()
	return errors.Join(p.devices.remove(), p.dropOthers())
}

func (p *Plane) closeStanding() {
	if p.standing != nil {
		_ = p.standing.none.close()
	}
	p.standing = nil
}
