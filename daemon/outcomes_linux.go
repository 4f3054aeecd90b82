package daemon

import (
	"context"
	"net"
	"net/netip"
	"sync"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/dataplane/outcomes"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/internal/namespace"
	"fairlead.dev/fairlead/model"
)

// outcomeWatch is what the kernel tells of translated connections. It is opened when it is first asked, and again after
// an error.
type outcomeWatch struct {
	network *namespace.Namespace
	needed  func() bool

	mu    sync.Mutex
	watch *outcomes.Watch // nil: not open
}

// outcomes is for the engine.
func (d *Daemon) outcomes() engine.Outcomes {
	d.node.outcomes.network = &d.node.network
	d.node.outcomes.needed = d.kernelTranslates
	return &d.node.outcomes
}

// kernelTranslates reports whether connection tracking knows the connections of the plane in force. In modes userspace
// and ebpf the plane tells what becomes of them, and tracking all others would cost each packet something.
func (d *Daemon) kernelTranslates() bool {
	switch d.mode() {
	case ebpfPlane:
		return d.config.Load().Fairlead.EBPF.Packets == config.EBPFPacketsByNFTables
	case userspacePlane, autoPlane:
		return false
	}
	return true
}

// changeOutcomes has the kernel stop watching if a new configuration does not need it.
func (d *Daemon) changeOutcomes(c *config.Config) {
	if c.Fairlead.BackendHealth == config.BackendHealthOff {
		d.node.outcomes.close()
	}
}

// Take implements engine.Outcomes.
func (o *outcomeWatch) Take(answers bool, f func(model.Outcome)) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.needed() {
		o.stop()
		return nil
	}
	if o.watch == nil {
		err := o.network.Do(func() (err error) {
			o.watch, err = outcomes.Open()
			return err
		})
		if err != nil {
			return err
		}
	}
	err := o.watch.Take(answers, f)
	if err != nil {
		o.stop()
	}
	return err
}

// Connect implements engine.Outcomes. The socket belongs to the node's network namespace.
func (o *outcomeWatch) Connect(ctx context.Context, backend netip.AddrPort) bool {
	accepted := false
	_ = o.network.Do(func() error {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", backend.String())
		if accepted = err == nil; accepted {
			_ = conn.Close()
		}
		return err
	})
	return accepted
}

func (o *outcomeWatch) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.stop()
}

func (o *outcomeWatch) stop() {
	if o.watch != nil {
		_ = o.watch.Close() // nothing waits in it
		o.watch = nil
	}
}
