package bench

import (
	"errors"
	"io"
	"net"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"fairlead.dev/fairlead/lab/testbed"
)

// idlePrograms is the name of the contender without a proxy, whose packets pass attachIdle's programs.
const idlePrograms = "programs that do nothing"

// attachIdle puts a program that does nothing wherever connections, requests and responses pass one of the ebpf plane's.
// No plane of this kind can cost less. It needs the hooks of Linux 6.6. Detach takes them away.
func attachIdle(b *testing.B, bed *testbed.Bed) (detach func()) {
	b.Helper()
	const (
		allow = 1
		next  = -1 // TCX_NEXT in linux/bpf.h
	)
	var failed error
	var links []io.Closer
	keep := func(l link.Link, err error) {
		if err == nil {
			links = append(links, l)
		}
		failed = errors.Join(failed, err)
	}
	detach = func() {
		for _, l := range links {
			l.Close()
		}
	}
	for _, at := range []ebpf.AttachType{
		ebpf.AttachCGroupInet4Connect, ebpf.AttachCGroupInet6Connect,
		ebpf.AttachCGroupUDP4Sendmsg, ebpf.AttachCGroupUDP6Sendmsg,
	} {
		p := idleProgram(b, ebpf.CGroupSockAddr, at, allow)
		keep(link.AttachCgroup(link.CgroupOptions{Path: bed.Cgroup(), Attach: at, Program: p}))
	}
	p := idleProgram(b, ebpf.SchedCLS, ebpf.AttachNone, next)
	err := bed.Do(testbed.Node, func() error {
		devices, err := netlink.LinkList()
		for _, d := range devices {
			if d.Attrs().Flags&net.FlagLoopback != 0 {
				continue
			}
			for _, at := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
				keep(link.AttachTCX(link.TCXOptions{Interface: d.Attrs().Index, Program: p, Attach: at}))
			}
		}
		return err
	})
	if err := errors.Join(failed, err); err != nil {
		detach()
		b.Fatal("attach programs that do nothing: ", err)
	}
	return detach
}

// idleProgram always has the same result.
func idleProgram(b *testing.B, kind ebpf.ProgramType, at ebpf.AttachType, result int32) *ebpf.Program {
	b.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: kind, AttachType: at, Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, result), asm.Return()},
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { p.Close() })
	return p
}
