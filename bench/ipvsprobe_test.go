package bench

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// answering returns when each of some Services has answered the arena's client. It tries all the time, but only when
// the processor has nothing else to do (SCHED_IDLE): the proxy, with which it shares that, hardly notices, and
// the answer is noticed at once where a sleeping process would take milliseconds to wake up.
func (a *arena) answering(services []int, limit time.Duration) (when time.Time, err error) {
	var targets []netip.AddrPort
	for _, i := range services {
		targets = append(targets, netip.AddrPortFrom(serviceAddr(i), servicePort))
	}
	err = a.bed.Do(clientPod, func() error {
		if err := errors.Join(blockSignals(), beIdle()); err != nil {
			return err
		}
		for begin := time.Now(); len(targets) > 0; {
			open, err := answersNow(targets[0])
			switch {
			case err != nil:
				return err
			case open:
				targets = targets[1:]
			case time.Since(begin) > limit:
				return fmt.Errorf("%d of %d Services do not answer after %v", len(targets), len(services), limit)
			}
		}
		when = time.Now()
		return nil
	})
	a.drain()
	return when, err
}

// beIdle gives the calling thread what time others leave.
func beIdle() error {
	const size, policy = unix.SizeofSchedAttr, 5 // SCHED_IDLE
	return os.NewSyscallError("sched_setattr", unix.SchedSetAttr(0, &unix.SchedAttr{Size: size, Policy: policy}, 0))
}

// answersNow reports whether a connection comes about while connect runs: where all ends are in one kernel the answer is
// there when it returns.
func answersNow(to netip.AddrPort) (open bool, err error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false, os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	err = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	if err != nil {
		return false, os.NewSyscallError("setsockopt", err)
	}
	raw := rawSockaddr(to.Addr(), to.Port())
	_, _, errno := unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&raw)), unix.SizeofSockaddrInet4)
	if errno != 0 && !errors.Is(errno, unix.EINPROGRESS) {
		return false, nil
	}
	_, err = unix.Getpeername(fd) // fails until there is a connection
	return err == nil, nil
}
