package ebpf

import (
	"errors"
	"fmt"
	"sync"

	"github.com/cilium/ebpf"
)

// Probed is what planes have found out about the kernel: that it takes the programs. To verify them takes a twentieth
// of a second, which planes of the same process may share.
type Probed struct {
	mu            sync.Mutex
	sockets       bool
	hasSetRetval  bool
	cannotTell    error
	packets, fast bool // those for packets, without that of XDP and with it
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
		known.sockets, known.hasSetRetval, known.cannotTell = true, p.hasSetRetval, p.cannotTell
	}
	p.hasSetRetval, p.cannotTell = known.hasSetRetval, known.cannotTell
	return nil
}

func (p *Plane) probeSockets() error {
	tables, err := newSets()
	if err != nil {
		return whyRefused(err)
	}
	defer tables.close()
	var verifier *ebpf.VerifierError
	var c *ebpf.Collection
	for _, p.hasSetRetval = range []bool{true, false} { // Linux 5.18
		p.cannotTell = nil
		if c, err = p.loadSockets(tables); !errors.As(err, &verifier) {
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
	done := &known.packets
	if fast {
		done = &known.fast
	}
	if *done {
		return nil
	}
	err := p.verifyPackets(fast)
	*done = err == nil
	return err
}

func (p *Plane) verifyPackets(fast bool) error {
	tables, err := newSets()
	if err != nil {
		return whyRefused(err)
	}
	defer tables.close()
	o := packetOptions{
		Ports: portRange{First: 1024, Count: 1}, Translations: 1,
		Programs: []string{packetsProgFromAnywhere, packetsProgLeave},
	}
	if fast {
		o.Programs = append(o.Programs, packetsProgFromOutside)
	}
	packets, err := newPackets(tables, o)
	if err != nil {
		return whyRefused(fmt.Errorf("programs for packets: %w", err))
	}
	defer packets.Close()
	return attachable(packets.Programs[packetsProgLeave])
}
