package conformance_test

import (
	"context"
	"errors"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/ipvs"
	"fairlead.dev/fairlead/lab/conformance"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/model"
)

// TestSync_besides has clients ask before each thing that a plane does to the kernel, beside another one that serves
// them.
func TestSync_besides(t *testing.T) {
	t.Parallel()
	for i, now := range besidesEachOther(t) {
		t.Run("beside "+now.name, func(t *testing.T) {
			all := besidesEachOther(t) // each has its own place for what it pins
			b := newBesides(t, nil)
			b.serve(all[i])
			b.sync(all[(i+1)%len(all)])
		})
	}
}

func besidesEachOther(t *testing.T) []successor {
	return append(filters(t), successor{"ebpf", ebpfSessions(t)})
}

// TestSync_besidesIPVS has IPVS take the place of another plane that has taken its own; connections are left.
func TestSync_besidesIPVS(t *testing.T) {
	t.Parallel()
	if !hasIPVS(t) {
		vm.Replay(t, "IPVS")
		return
	}
	for _, other := range filters(t) {
		t.Run(other.name, func(t *testing.T) {
			b := newBesides(t, nil)
			back := successor{"ipvs", ipvsPlane(ipvs.Options{})}
			b.serve(back)
			conn, err := b.bed.Dial(t.Context(), "client", model.TCP, affinityKeys()[0].AddrPort())
			must(t, err)
			defer conn.Close()
			b.serve(other)
			must(t, b.bed.Do(testbed.Node, func() error {
				n, err := ipvs.Driver(ipvs.Options{}).Drain(t.Context(), dataplane.Config{})
				if err == nil && n == 0 {
					err = errors.New("no connections are left")
				}
				return err
			}))
			b.ask("with " + other.name)
			b.sync(back)
		})
	}
}

// besides is a node on which one plane serves while another one comes.
type besides struct{ affinityServices }

func newBesides(t *testing.T, bed conformance.Network) besides {
	return besides{newAffinityServices(t, bed)}
}

func (b besides) open(s successor, c dataplane.Config) dataplane.Dataplane {
	b.Helper()
	p := memories{T: b.T, bed: b.bed, open: s.open}.plane(c)
	b.Cleanup(func() { must(b.T, errors.Join(p.Remove(context.Background()), p.Close())) })
	return p
}

func (b besides) serve(s successor) {
	b.Helper()
	must(b.T, b.open(s, dataplane.Config{}).Sync(b.Context(), b.s))
	b.ask("with " + s.name)
}

func (b besides) sync(s successor) {
	b.Helper()
	done, serves := "", true
	c := dataplane.Config{}
	c.Fault = func(operation string) error {
		if serves {
			b.ask("with " + s.name + ", after" + done + ", before " + operation)
		}
		done += " " + operation
		return nil
	}
	p := b.open(s, c)
	_, err := p.SetStage(b.Context(), nil, dataplane.Standby)
	must(b.T, errors.Join(err, p.Sync(b.Context(), b.s)))
	serves = false
	b.ask("with " + s.name + " as well")
}
