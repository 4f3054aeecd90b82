package ebpf

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
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
