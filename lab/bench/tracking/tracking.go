// Package tracking measures what it costs a program at a device to remember flows: in a table of its own, as those of
// the ebpf plane do, and in the kernel's connection tracking, which programs can use since Linux 6.0 if the kernel has
// BTF. It serves nobody.
//
//	bpf/flows.c ─► one program for each way to find a flow and to add one ─► BPF_PROG_TEST_RUN ─► ns
package tracking

import (
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
)

//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel flows bpf/flows.c -- -mcpu=v3 -O2 -Wall -Wextra -Wno-unused-parameter -Werror -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu

// What programs do once.
const (
	OwnFind            = flowsProgOwnFind
	OwnAdd             = flowsProgOwnAdd
	OwnAddHidden       = flowsProgOwnAddHidden // the client is hidden behind the node
	ConntrackFind      = flowsProgConntrackFind
	ConntrackAdd       = flowsProgConntrackAdd
	ConntrackAddHidden = flowsProgConntrackAddHidden
)

// Flows are the programs, with no flow yet. Those in the kernel's connection tracking belong to the network namespace
// of the thread that runs programs, and end with it.
type Flows struct{ *ebpf.Collection }

// Load makes programs whose flows have clients of their own, from number first on. It fails with ebpf.ErrNotSupported
// where programs cannot use connection tracking.
func Load(first uint32) (Flows, error) {
	spec, err := loadFlows()
	if err != nil {
		return Flows{}, err
	}
	if err := spec.Variables[flowsVarPort].Set(first); err != nil {
		return Flows{}, err
	}
	c, err := ebpf.NewCollection(spec)
	return Flows{c}, err
}

// Run has a program do its thing n times, and returns what each took.
func (f Flows) Run(program string, n int) (each time.Duration, err error) {
	_, each, err = f.Programs[program].Benchmark(make([]byte, 64), n, nil)
	if err != nil {
		return 0, err
	}
	var failed uint32
	if err := f.Variables[flowsVarFailed].Get(&failed); err != nil {
		return 0, err
	}
	if failed > 0 {
		err := fmt.Errorf("%s has failed %d times", program, failed)
		return 0, errors.Join(err, f.Variables[flowsVarFailed].Set(uint32(0)))
	}
	return each, nil
}
