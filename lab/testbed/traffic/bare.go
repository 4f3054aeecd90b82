package traffic

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// connects is the client of protocol Bare: a thread with blocking sockets. The runtime's scheduler, which would
// otherwise take over while the thread is in the kernel, does not hear of connect: within that call the kernel carries
// all packets through all namespaces.
func (l Load) connects(ctx context.Context, c *collector) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // for good: the thread ends with its goroutine
		if err := blockSignals(); err != nil {
			c.add(sample{}, err)
			return
		}
		targets, sources := rawTargets(l.Targets), &sources{ports: l.Sources}
		for t := range l.bareTurns(ctx, c) {
			late := time.Since(t.at)
			took, err := l.connect(&targets[t.number%len(targets)], sources)
			c.add(sample{connect: took, connected: true, total: late + took}, err)
		}
	}()
	<-done
}

// bareTurns has no goroutine beside this thread.
func (l Load) bareTurns(ctx context.Context, c *collector) func(yield func(turn) bool) {
	if l.Rate > 0 {
		finestSleep()
		return l.clock(ctx)
	}
	next := l.turns(ctx, c)
	return func(yield func(turn) bool) {
		for t, ok := next(); ok && yield(t); t, ok = next() {
		}
	}
}

// blockSignals keeps the runtime's own signals from interrupting connect.
func blockSignals() error {
	err := unix.PthreadSigmask(unix.SIG_BLOCK, &unix.Sigset_t{Val: [16]uint64{^uint64(0)}}, nil)
	return os.NewSyscallError("sigmask", err)
}

// rawTarget is what connect takes.
type rawTarget struct {
	address unix.RawSockaddrInet6 // in which one of IPv4 fits
	size    uintptr
}

func rawTargets(targets []netip.AddrPort) []rawTarget {
	raw := make([]rawTarget, len(targets))
	for i, to := range targets {
		port := to.Port()<<8 | to.Port()>>8
		if to.Addr().Is6() {
			raw[i].address = unix.RawSockaddrInet6{Family: unix.AF_INET6, Port: port, Addr: to.Addr().As16()}
			raw[i].size = unix.SizeofSockaddrInet6
			continue
		}
		*(*unix.RawSockaddrInet4)(unsafe.Pointer(&raw[i].address)) = unix.RawSockaddrInet4{
			Family: unix.AF_INET, Port: port, Addr: to.Addr().As4(),
		}
		raw[i].size = unix.SizeofSockaddrInet4
	}
	return raw
}

// connect opens a connection and ends it. What it took is the system call's alone.
func (l Load) connect(to *rawTarget, from *sources) (time.Duration, error) {
	fd, err := l.socket(to, from)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	start := time.Now()
	err = to.connect(fd)
	return time.Since(start), err
}

// connect is the system call, of which the runtime's scheduler does not hear.
func (to *rawTarget) connect(fd int) error {
	_, _, number := unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&to.address)), to.size)
	if number != 0 {
		return number
	}
	return nil
}

func (l Load) socket(to *rawTarget, from *sources) (int, error) {
	fd, err := blockingSocket(int(to.address.Family), l.Timeout)
	if err == nil && len(from.ports) > 0 {
		if err = bindSource(fd, to.address.Family, from); err != nil {
			unix.Close(fd)
		}
	}
	return fd, err
}

// blockingSocket is one that is reset when it is closed: there would soon be too many that wait.
func blockingSocket(family int, timeout time.Duration) (int, error) {
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, os.NewSyscallError("socket", err)
	}
	return fd, prepareBlocking(fd, timeout)
}

// prepareBlocking closes the socket if it fails.
func prepareBlocking(fd int, timeout time.Duration) error {
	wait := unix.NsecToTimeval(timeout.Nanoseconds())
	err := errors.Join(unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &wait),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait),
		unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1))
	if err != nil {
		unix.Close(fd)
	}
	return err
}

// bindSource tries one source port after the other if one is in use.
func bindSource(fd int, family uint16, from *sources) error {
	err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	if err != nil {
		return err
	}
	for range from.ports {
		port := from.take()
		var local unix.Sockaddr = &unix.SockaddrInet4{Port: port}
		if family == unix.AF_INET6 {
			local = &unix.SockaddrInet6{Port: port}
		}
		if err = unix.Bind(fd, local); !errors.Is(err, unix.EADDRINUSE) {
			return err
		}
	}
	return err
}
