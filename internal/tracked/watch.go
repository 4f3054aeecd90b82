package tracked

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nfnetlink"
)

const (
	eventsSetting = "/proc/sys/net/netfilter/nf_conntrack_events"
	watchBuffer   = 1 << 20
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
	datagram []byte
}

// NewWatch begins to listen.
func NewWatch(to Event) (*Watch, error) {
	switch text, err := os.ReadFile(eventsSetting); {
	case err != nil:
		return nil, fmt.Errorf("connection tracking tells no events: %w", err)
	case strings.TrimSpace(string(text)) == "0":
		return nil, errors.New("connection tracking tells no events, as the sysctl net.netfilter.nf_conntrack_events is 0")
	}
	s, err := nfnetlink.Subscribe(unix.NETLINK_NETFILTER, watchBuffer, uint(to))
	if err != nil {
		return nil, fmt.Errorf("subscribe to flows: %w", err)
	}
	return &Watch{s, make([]byte, datagramSize)}, nil
}

// Next waits for flows and passes them to f, which may not keep them. After ErrMissed it may be called again.
func (w *Watch) Next(f func(*Flow)) error {
	n, err := w.socket.Read(w.datagram)
	if errors.Is(err, unix.ENOBUFS) {
		return ErrMissed
	}
	if err != nil {
		return err
	}
	for m := range nfnetlink.Messages(w.datagram[:n]) {
		if m.Header.Type>>8 == unix.NFNL_SUBSYS_CTNETLINK && len(m.Data) >= headerSize {
			var flow Flow
			flow.decode(m.Data[headerSize:])
			f(&flow)
		}
	}
	return nil
}

// Close ends a call of Next.
func (w *Watch) Close() error { return w.socket.Close() }
