package traffic

import (
	"fmt"
	"os"
	"time"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"
)

// Usage is what a process takes.
type Usage struct {
	User, System time.Duration // processor time
	Memory       uint64        // resident, bytes
	MostMemory   uint64        // that it has ever had
}

// CPU is all the processor time.
func (u Usage) CPU() time.Duration { return u.User + u.System }

// Since is the processor time since an earlier Usage, and the memory now.
func (u Usage) Since(before Usage) Usage {
	u.User -= before.User
	u.System -= before.System
	return u
}

// usage is this process's.
func usage() (Usage, error) {
	var r unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &r); err != nil {
		return Usage{}, os.NewSyscallError("getrusage", err)
	}
	u := Usage{
		User: time.Duration(r.Utime.Nano()), System: time.Duration(r.Stime.Nano()), MostMemory: uint64(r.Maxrss) << 10,
	}
	self, err := procfs.Self()
	if err != nil {
		return u, err
	}
	stat, err := self.Stat()
	if err != nil {
		return u, fmt.Errorf("memory: %w", err)
	}
	u.Memory = uint64(stat.ResidentMemory())
	return u, nil
}
