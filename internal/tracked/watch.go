package tracked

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nfnetlink"
)

const (
	eventsSetting = "/proc/sys/net/netfilter/nf_conntrack_events"
	interval      = 20 * time.Millisecond
	watchBuffer   = 16 << 20 // holds more flows than end in many intervals
	datagramSize  = 64 << 10 // more than the kernel puts into one
	headerSize    = 4        // of struct nfgenmsg
)

// Event is what a Watch hears of.
type Event uint

// The events of flows.
const (
	Begun Event = unix.NFNLGRP_CONNTRACK_NEW
	Ended Event = unix.NFNLGRP_CONNTRACK_DESTROY
)

// ErrMissed says that events came faster than they were read.
var ErrMissed = errors.New("events of flows came faster than they were read")

// Watch hears of flows, in the network namespace of the thread that made it.
type Watch struct {
	socket   *os.File
	raw      syscall.RawConn
	datagram []byte
	closing  chan struct{}
}

// NewWatch begins to listen.
func NewWatch(to Event) (*Watch, error) {
	switch text, err := os.ReadFile(eventsSetting); {
	case err != nil:
		return nil, fmt.Errorf("connection tracking tells no events: %w", err)
	case strings.TrimSpace(string(text)) == "0":
		return nil, errors.New("connection tracking tells no events, as the sysctl net.netfilter.nf_conntrack_events is 0")
	}
	s, err := nfnetlink.Subscribe(unix.NETLINK_NETFILTER, 0, watchBuffer, uint(to))
	if err != nil {
		return nil, fmt.Errorf("subscribe to flows: %w", err)
	}
	raw, err := s.SyscallConn()
	return &Watch{s, raw, make([]byte, datagramSize), make(chan struct{})}, err
}

// Next waits for a while, and passes the flows of that time to f, which may not keep them. After ErrMissed it may be
// called again.
//
// No goroutine waits at the socket itself: to wake a process costs a connection more than to tell of it.
func (w *Watch) Next(f func(*Flow)) error {
	select {
	case <-w.closing:
		return os.ErrClosed
	case <-time.After(interval):
	}
	for {
		n, err := w.receive()
		switch {
		case errors.Is(err, unix.EAGAIN):
			return nil
		case errors.Is(err, unix.ENOBUFS):
			return ErrMissed
		case err != nil:
			return err
		}
		for m := range nfnetlink.Messages(w.datagram[:n]) {
			if m.Header.Type>>8 == unix.NFNL_SUBSYS_CTNETLINK && len(m.Data) >= headerSize {
				var flow Flow
				flow.decode(m.Data[headerSize:])
				f(&flow)
			}
		}
	}
}

// receive does not wait.
func (w *Watch) receive() (n int, err error) {
	failure := w.raw.Read(func(fd uintptr) bool {
		n, _, err = unix.Recvfrom(int(fd), w.datagram, unix.MSG_DONTWAIT)
		return true
	})
	return n, errors.Join(failure, err)
}

// Close ends a call of Next. It is called once.
func (w *Watch) Close() error {
	close(w.closing)
	return w.socket.Close()
}
