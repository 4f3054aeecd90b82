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

// expect begins to wait until each of some Services has answered the arena's client, and wait returns when that was. It
// tries all the time, but only when the processor has nothing else to do (SCHED_IDLE). So the proxy on the same
// processor hardly notices, and the answer is noticed at once. A sleeping process would take milliseconds to wake up.
func (a *arena) expect(services []int, limit time.Duration, ended <-chan struct{}) (wait func() (time.Time, error)) {
	var when time.Time
	begun, done := make(chan struct{}), make(chan error, 1)
	go func() {
		done <- a.bed.Do(clientPod, func() error {
			if err := errors.Join(blockSignals(), beIdle()); err != nil {
				return err
			}
			close(begun)
			err := tryAll(services, limit, ended)
			when = time.Now()
			return err
		})
	}()
	select {
	case <-begun:
	case err := <-done:
		done <- err
	}
	return func() (time.Time, error) {
		err := <-done
		a.drain()
		return when, err
	}
}

// tryAll returns when each Service has answered, or the proxy has ended.
func tryAll(services []int, limit time.Duration, ended <-chan struct{}) error {
	for begin := time.Now(); len(services) > 0; {
		select {
		case <-ended:
			return errors.New("the proxy has ended")
		default:
		}
		open, err := answersNow(netip.AddrPortFrom(serviceAddr(services[0]), servicePort))
		switch {
		case err != nil:
			return err
		case open:
			services = services[1:]
		case time.Since(begin) > limit:
			return fmt.Errorf("%d Services do not answer after %v", len(services), limit)
		}
	}
	return nil
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
