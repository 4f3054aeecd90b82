package vm

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// pin keeps the calling thread, and what it starts meanwhile, on one CPU. The processes of a User-Mode
// Linux wake each other all the time; on several CPUs each of its system calls takes several times longer.
type pin struct {
	before unix.CPUSet
	lock   *os.File
}

// takeCPU takes a CPU that no other Machine of this user has, if there is one. The calling goroutine is
// locked to its thread.
func takeCPU() (*pin, error) {
	p := &pin{}
	if err := unix.SchedGetaffinity(0, &p.before); err != nil {
		return nil, fmt.Errorf("which CPUs there are: %w", err)
	}
	var allowed []int
	for cpu := range len(p.before) * 64 {
		if p.before.IsSet(cpu) {
			allowed = append(allowed, cpu)
		}
	}
	cpu, lock, err := lockOne(allowed)
	if err != nil {
		return nil, err
	}
	p.lock = lock
	var one unix.CPUSet
	one.Set(cpu)
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		lock.Close()
		return nil, fmt.Errorf("stay on CPU %d: %w", cpu, err)
	}
	return p, nil
}

// release lets the thread go; the lock stays until it is closed.
func (p *pin) release() { _ = unix.SchedSetaffinity(0, &p.before) }

// lockOne returns a CPU and its lock. Where all are locked it is any of them, and the file is no lock.
func lockOne(cpus []int) (cpu int, lock *os.File, err error) {
	dir, err := cacheDir()
	if err != nil {
		return 0, nil, err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return 0, nil, err
	}
	start := os.Getpid()
	for i := range cpus {
		cpu = cpus[(start+i)%len(cpus)]
		lock.Close() // of the CPU before, nil at first
		lock, err = os.OpenFile(filepath.Join(dir, fmt.Sprintf("cpu-%d.lock", cpu)), os.O_CREATE|os.O_RDWR, 0o644)
		if err != nil {
			return 0, nil, err
		}
		if unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			break
		}
	}
	return cpu, lock, nil
}
