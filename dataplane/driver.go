package dataplane

import (
	"context"
	"errors"
	"iter"
	"net/netip"

	"fairlead.dev/fairlead/model"
)

// A Driver opens a data plane, and sees to what one of this or an earlier process, with whatever options, has left
// in the kernel. All functions are about the network namespace of the calling thread; a nil one has nothing to do.
//
//	Inspect ─► Leftover ─┬─ Sessions ─► the new plane learns
//	                     └─ Drain, until no connection needs it, or Remove
type Driver struct {
	Name string
	Open New
	// Prepare does what NodePorts on 127.0.0.1 need and a process with CAP_NET_ADMIN alone may not do.
	Prepare func(Config) error
	Inspect func() (Leftover, error)
	// Sessions are those that pools of s with affinity have in the kernel; see Handover.
	Sessions func(ctx context.Context, c Config, s *model.State) iter.Seq2[Session, error]
	// Remove deletes what is left. Connections that need it end.
	Remove func(context.Context, Config) error
	// Drain does what Remove does, but as long as there are connections that need what is left. It returns how many.
	Drain func(context.Context, Config) (connections int, err error)
	// Carries reports whether connections of the process to backends come from an address of its own.
	Carries func(netip.Addr) bool
	// HandBack does what Remove does on a node where kube-proxy is back in the mode of that name: what both have stays.
	HandBack func(context.Context, Config) error
}

// SeenBy has the Driver do Sessions and Remove by a plane that look opens: one that has programmed nothing itself knows
// only what the kernel holds.
func (d Driver) SeenBy(look New) Driver {
	d.Sessions = func(ctx context.Context, c Config, s *model.State) iter.Seq2[Session, error] {
		return func(yield func(Session, error) bool) {
			p, err := look(c)
			if err != nil {
				yield(Session{}, err)
				return
			}
			defer p.Close()
			p.Sessions(ctx, s)(yield)
		}
	}
	d.Remove = func(ctx context.Context, c Config) error {
		p, err := look(c)
		if err != nil {
			return err
		}
		return errors.Join(p.Remove(ctx), p.Close())
	}
	return d
}
