package ebpf

import "github.com/cilium/ebpf"

// grace tells when programs have ended that run now. It is a map of maps, for the sake of wait.
type grace struct{ outer *ebpf.Map }

func graceInner() *ebpf.MapSpec {
	return &ebpf.MapSpec{Name: "grace_inner", Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1}
}

func newGrace() (grace, error) {
	m, err := ebpf.NewMap(&ebpf.MapSpec{
		Name: "grace", Type: ebpf.ArrayOfMaps, KeySize: 4, ValueSize: 4, MaxEntries: 1, InnerMap: graceInner(),
	})
	return grace{m}, err
}

func (g grace) close() error { return g.outer.Close() }

// wait returns when no program runs any more that ran when it was called: the kernel promises this of an update of a
// map of maps (maybe_wait_bpf_programs in kernel/bpf/syscall.c), and of nothing else. It takes some milliseconds.
func (g grace) wait() error {
	inner, err := ebpf.NewMap(graceInner())
	if err != nil {
		return err
	}
	defer inner.Close()
	return g.outer.Put(uint32(0), inner)
}
