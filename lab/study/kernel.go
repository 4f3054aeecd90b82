package study

import (
	"runtime"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"
)

// describeKernel describes the machine. Unknown fields stay empty.
func describeKernel(name string) Kernel {
	k := Kernel{Name: name, CPUs: runtime.NumCPU()}
	if name == Test {
		k.Note = "a User-Mode Linux on one CPU: its figures rank contenders, and say nothing of other machines; eBPF would " +
			"be interpreted there and takes no part"
	}
	var uts unix.Utsname
	if unix.Uname(&uts) == nil {
		k.Release = unix.ByteSliceToString(uts.Release[:])
	}
	proc, err := procfs.NewDefaultFS()
	if err != nil {
		return k
	}
	if cpus, err := proc.CPUInfo(); err == nil && len(cpus) > 0 {
		k.CPU = cpus[0].ModelName
	}
	if memory, err := proc.Meminfo(); err == nil && memory.MemTotalBytes != nil {
		k.Memory = *memory.MemTotalBytes
	}
	return k
}

// KernelMemory is what the kernel has taken for itself, of all kinds of memory that rules, tables and connections are
// kept in. It is the whole machine's: what else goes on there is in it.
func KernelMemory() (bytes int64, err error) {
	proc, err := procfs.NewDefaultFS()
	if err != nil {
		return 0, err
	}
	m, err := proc.Meminfo()
	if err != nil {
		return 0, err
	}
	for _, part := range []*uint64{m.SlabBytes, m.VmallocUsedBytes, m.PercpuBytes} {
		if part != nil {
			bytes += int64(*part)
		}
	}
	return bytes, nil
}
