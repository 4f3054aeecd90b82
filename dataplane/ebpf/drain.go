package ebpf

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// Another plane is in force. Connections that sockets have made go on by themselves; those that pass as packets need
// the programs at the devices:
//
//	Drain, the first time ─► the same programs with no rows: they translate the flows that they know, and nothing new
//	Drain, from then on ───► how many flows are left? ─► none: all goes

// drainLeft does what removeLeft does, but as long as there are flows through programs at devices. It tells how many.
func drainLeft(ctx context.Context, c dataplane.Config) (flows int, err error) {
	c.Log = c.Logger()
	dirs, err := leftoverPins()
	if err != nil {
		return 0, err
	}
	for _, dir := range dirs {
		n, err := drain(ctx, c, dir)
		if err != nil {
			return flows, fmt.Errorf("ebpf: %w", err)
		}
		flows += n
	}
	return flows, nil
}

func drain(ctx context.Context, c dataplane.Config, dir string) (flows int, err error) {
	p := &Plane{config: c, pins: dir, serve: TC, cannotRelease: true}
	defer func() { err = errors.Join(err, p.Close()) }()
	if flows, err = p.countFlows(); err != nil {
		return 0, err
	}
	if flows == 0 {
		return 0, p.Remove(ctx)
	}
	if err := p.standBy(); err != nil {
		return flows, err
	}
	p.divert()
	return flows, nil
}

// eachTranslation calls f with those in the memory, if that is laid out as this version's: another one only its own
// programs understand.
func (p *Plane) eachTranslation(f func(packetsTuple, packetsTranslation) error) error {
	m, err := ebpf.LoadPinnedMap(p.memoryPath(packetsMapTranslations), nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer m.Close()
	spec, err := packetObjects()
	if err != nil {
		return err
	}
	if want := spec.Maps[packetsMapTranslations]; m.KeySize() != want.KeySize || m.ValueSize() != want.ValueSize {
		return nil
	}
	return each(m, f)
}

// countFlows counts those that may go on.
func (p *Plane) countFlows() (n int, err error) {
	at, err := now()
	if err != nil {
		return 0, err
	}
	patience := patience()
	return n, p.eachTranslation(func(key packetsTuple, flow packetsTranslation) error {
		lasts := packetsTicks(patience[phase(key.Protocol, flow.State)]) * packetsTicksTICKS
		if flow.State&packetsStateBACK == 0 && key.Hook == packetsHookINGRESS && flow.quiet(at) < lasts {
			n++
		}
		return nil
	})
}

// drainingMark is a directory that says that the programs have no rows any more.
const drainingMark = "retired"

// standBy puts programs without rows in force where there are some, and nowhere else.
func (p *Plane) standBy() error {
	var err error
	if p.devices, err = newDevices(p.linksDir(), p.config.Log, p.config.Inject); err != nil {
		return err
	}
	mark := filepath.Join(p.pins, drainingMark)
	if _, err := os.Stat(mark); err == nil {
		return nil
	}
	if err := errors.Join(p.identifyNode(), p.adoptCgroup()); err != nil {
		return err
	}
	p.sizes, p.draining = p.pinnedSizes(), true
	if err := p.replace(model.NewState()); !dataplane.Known(err) {
		return err
	}
	return os.MkdirAll(mark, 0o700)
}

// adoptCgroup finds out to which cgroup the links are. Without a link the plane can have no programs for sockets.
func (p *Plane) adoptCgroup() error {
	for _, hook := range p.hookNames() {
		l, err := link.LoadPinnedLink(p.linkPath(hook), nil)
		if err != nil {
			return fmt.Errorf("%s: %w", hook, err)
		}
		info, err := l.Info()
		l.Close()
		if err != nil {
			return fmt.Errorf("%s: %w", hook, err)
		}
		if at := info.Cgroup(); at != nil {
			p.cgroupID = at.CgroupId
		}
	}
	return nil
}
