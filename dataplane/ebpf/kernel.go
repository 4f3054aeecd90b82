package ebpf

import (
	"errors"
	"fmt"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/thread"
)

// checkKernel tells what is missing before the programs are tried, for their errors do not say it.
func checkKernel() error {
	err := features.HaveProgramType(ebpf.CGroupSockAddr)
	switch {
	case errors.Is(err, unix.ENOSYS):
		return fmt.Errorf("%w: it has no eBPF (CONFIG_BPF_SYSCALL)", dataplane.ErrUnsupported)
	case errors.Is(err, ebpf.ErrNotSupported):
		return fmt.Errorf("%w: it runs no eBPF programs for the sockets of a cgroup (CONFIG_CGROUP_BPF)",
			dataplane.ErrUnsupported)
	}
	if err := rlimit.RemoveMemlock(); err != nil { // before Linux 5.11 maps count as locked memory
		return fmt.Errorf("before Linux 5.11 this process needs CAP_SYS_RESOURCE, for the memory of maps: %w", err)
	}
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("the kernel lets this process load no eBPF programs (look for seccomp, lockdown, or a policy of "+
			"SELinux): %w", err)
	}
	return nil
}

// whyRefused says why the kernel does not take the programs that it has verified.
func whyRefused(err error) error {
	var verifier *ebpf.VerifierError
	if !errors.Is(err, ebpf.ErrNotSupported) && !errors.Is(err, unix.EINVAL) && !errors.As(err, &verifier) {
		return err
	}
	release := "unknown"
	var name unix.Utsname
	if unix.Uname(&name) == nil {
		release = unix.ByteSliceToString(name.Release[:])
	}
	return fmt.Errorf("%w: this is Linux %s, needed is 5.10 or newer: %w", dataplane.ErrUnsupported, release, err)
}

// preemptsPrograms reports whether the kernel may interrupt a program for a packet by one for another packet.
func preemptsPrograms() bool {
	var name unix.Utsname
	return unix.Uname(&name) == nil && strings.Contains(unix.ByteSliceToString(name.Version[:]), "PREEMPT_RT")
}

// attachable reports whether programs for packets can be attached to a device. It tries that in a network namespace
// which ends with it; who may make none learns it from the node's devices.
func attachable(program *ebpf.Program) error {
	failed := make(chan error)
	thread.Run(func() {
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = attachToLoopback(program)
		} else if errors.Is(err, unix.EPERM) {
			err = nil
		}
		failed <- err
	})
	return <-failed
}

func attachToLoopback(program *ebpf.Program) error {
	lo := device{index: 1}
	l, err := link.AttachTCX(link.TCXOptions{Interface: lo.index, Program: program, Attach: ingress().attach})
	if err == nil {
		return l.Close()
	}
	d, err := newDevices("", nil, nil)
	if err != nil {
		return err
	}
	if err := d.attachFilter(lo, ingress(), program); err != nil {
		err = fmt.Errorf("%w: programs for packets need tcx (Linux 6.6), or CONFIG_NET_SCH_INGRESS and "+
			"CONFIG_NET_CLS_BPF: %w", dataplane.ErrUnsupported, err)
		_ = d.close()
		return err
	}
	return d.close()
}
