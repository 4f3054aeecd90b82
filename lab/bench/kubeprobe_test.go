package bench

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/testbed"
)

// A Service whose only endpoint accepts connections is open; if that refuses them it is shut. A prober
// opens connections to find out when a Service becomes the one or the other. It is one thread in the
// client's namespace, and a connection is two packets and a reset.
type prober struct {
	bed  *testbed.Bed
	add  chan *vigil
	done chan error
}

// vigil waits for a Service to change.
type vigil struct {
	to    netip.AddrPort
	open  bool // what it shall become
	since time.Time
	next  time.Time     // of its probes
	saw   chan struct{} // closed when it has become so
	took  time.Duration // from since, then
}

// Probes of a Service are a millisecond apart, and later 2 % of the time that they have gone on. So the probes of a
// slow change do not make it slower.
const (
	probeInterval = time.Millisecond
	probeSpread   = 50
	connectLimit  = 10 * time.Millisecond // connect() gives up; only what is not programmed takes so long
)

func newProber(bed *testbed.Bed) *prober {
	p := &prober{bed: bed, add: make(chan *vigil, 1000), done: make(chan error, 1)}
	go func() { p.done <- bed.Do(clientPod, p.run) }()
	return p
}

// watch begins a vigil.
func (p *prober) watch(to netip.AddrPort, open bool) *vigil {
	v := &vigil{to: to, open: open, since: time.Now(), saw: make(chan struct{})}
	p.add <- v
	return v
}

// wait returns how long the change took.
func (v *vigil) wait(limit time.Duration) (time.Duration, error) {
	select {
	case <-v.saw:
		return v.took, nil
	case <-time.After(limit): //nolint:forbidigo // the limit is part of the experiment
		return 0, fmt.Errorf("%s is not as it should be (open: %t) after %v", v.to, v.open, limit)
	}
}

func (p *prober) stop() error {
	close(p.add)
	return <-p.done
}

func (p *prober) run() error {
	if err := blockSignals(); err != nil {
		return err
	}
	var active []*vigil
	for {
		var ok bool
		if active, ok = p.take(active); !ok {
			return nil
		}
		pending := active[:0]
		soonest := time.Now().Add(probeInterval)
		for _, v := range active {
			changed, err := v.probe()
			switch {
			case err != nil:
				return err
			case !changed:
				pending = append(pending, v)
			}
			if v.next.Before(soonest) {
				soonest = v.next
			}
		}
		active = pending
		letPass(time.Until(soonest))
	}
}

// take adds new vigils, for one of which it waits if there is none.
func (p *prober) take(active []*vigil) (all []*vigil, ok bool) {
	for {
		if len(active) == 0 {
			v, ok := <-p.add
			if !ok {
				return nil, false
			}
			active = append(active, v)
		}
		select {
		case v, ok := <-p.add:
			if !ok {
				return nil, false
			}
			active = append(active, v)
		default:
			return active, true
		}
	}
}

// probe opens a connection, if it is time.
func (v *vigil) probe() (changed bool, err error) {
	now := time.Now()
	if now.Before(v.next) {
		return false, nil
	}
	open, known, err := connects(v.to, connectLimit)
	if err != nil {
		return false, err
	}
	if known && open == v.open {
		v.took = time.Since(v.since)
		close(v.saw)
		return true, nil
	}
	v.next = time.Now().Add(max(probeInterval, now.Sub(v.since)/probeSpread))
	return false, nil
}

// connects reports whether a Service accepts connections; it is not known if there is no clear answer within the limit.
func connects(to netip.AddrPort, limit time.Duration) (open, known bool, err error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false, false, os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	err = errors.Join(unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, new(unix.NsecToTimeval(limit.Nanoseconds()))))
	if err != nil {
		return false, false, os.NewSyscallError("setsockopt", err)
	}
	raw := rawSockaddr(to.Addr(), to.Port())
	_, _, errno := unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&raw)), unix.SizeofSockaddrInet4)
	switch errno {
	case 0:
		return true, true, nil
	case unix.ECONNREFUSED:
		return false, true, nil
	}
	return false, false, nil
}
