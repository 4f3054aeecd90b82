package ebpf

import (
	"errors"
	"fmt"
	"sync"

	"github.com/cilium/ebpf"

	"fairlead.dev/fairlead/model"
)

// Probed is what planes have found out about the kernel: that it takes the programs. To verify them takes it a third of
// a second, which planes of the same process may share.
type Probed struct {
	mu           sync.Mutex
	sockets      bool
	hasSetRetval bool
	packets      map[bool]bool // by whether that of XDP was among them
}

// probe has the kernel verify the programs. The error says what it lacks.
func (p *Plane) probe() error {
	known := p.probed
	known.mu.Lock()
	defer known.mu.Unlock()
	if !known.sockets {
		if err := p.probeSockets(); err != nil {
			return err
		}
		known.sockets, known.hasSetRetval = true, p.hasSetRetval
	}
	p.hasSetRetval = known.hasSetRetval
	return nil
}

func (p *Plane) probeSockets() error {
	var verifier *ebpf.VerifierError
	var c *ebpf.Collection
	var err error
	for _, p.hasSetRetval = range []bool{true, false} { // Linux 5.18
		if c, err = p.program(capacityFor(model.NewState()), model.Pods{}); !errors.As(err, &verifier) {
			break
		}
	}
	if err != nil {
		return whyRefused(err)
	}
	c.Close()
	return nil
}

// probePackets has it verify those for packets.
func (p *Plane) probePackets(fast bool) error {
	known := p.probed
	known.mu.Lock()
	defer known.mu.Unlock()
	if known.packets[fast] {
		return nil
	}
	if err := p.verifyPackets(fast); err != nil {
		return err
	}
	if known.packets == nil {
		known.packets = map[bool]bool{}
	}
	known.packets[fast] = true
	return nil
}

func (p *Plane) verifyPackets(fast bool) error {
	c, err := p.program(capacityFor(model.NewState()), model.Pods{})
	if err != nil {
		return err
	}
	defer c.Close()
	packets, err := newPackets(c.Maps, model.NewState(), packetOptions{
		Ports: portRange{First: 1024, Count: 1}, Translations: 1, Anywhere: true, Fast: fast,
	})
	if err != nil {
		return whyRefused(fmt.Errorf("programs for packets: %w", err))
	}
	defer packets.Close()
	return attachable(packets.Programs[packetsProgLeave])
}
