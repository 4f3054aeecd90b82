// Package external learns from the kernel that another program changes the objects of data planes, and which program it
// is. A notification is an occasion to look, not the truth: the kernel may drop those that are not read in time.
//
//	nf_tables ── transactions, with process ──────┐
//	rtnetlink ── rules, routes, links deleted ────┼─► is it of a plane? by this process? ─► Changes ─► engine: Audit
//	kernel audit ── x_tables replaced, with process ┘
//
// One Watch serves whatever plane is in force. The kernel tells nothing of IPVS and of eBPF maps: those are found by
// looking.
package external

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/nfnetlink"
)

// Watch tells of changes in the network namespace of the thread that made it.
type Watch struct {
	changes chan dataplane.ExternalChange
	self    self
	sockets []*os.File
	closing chan struct{}
	running sync.WaitGroup

	mu     sync.Mutex
	nft    *os.File // the socket that hears of nf_tables; nil: there is none
	pauses int
}

const (
	// maxPending is how many changes wait for the reader. More are dropped: the reader audits anyway.
	maxPending = 64
	// buffer is what one transaction of ours may fill; when it is full, that counts as a change.
	buffer = 4 << 20
	// datagramSize is more than the kernel puts into one (NLMSG_GOODSIZE in its include/linux/netlink.h).
	datagramSize = 64 << 10
	// pause is how long a socket that fails is left alone.
	pause = time.Second
)

// Open begins to listen. It leaves out sources of changes that the kernel, or the process's rights, do not allow. The
// error names these, and the Watch reports the others.
func Open() (*Watch, error) {
	w := &Watch{changes: make(chan dataplane.ExternalChange, maxPending), self: whoWeAre(), closing: make(chan struct{})}
	err := w.listen("changes of nf_tables", unix.NETLINK_NETFILTER, w.ruleset(), unix.NFNLGRP_NFTABLES)
	if err == nil {
		w.nft = w.sockets[0]
	}
	return w, errors.Join(err,
		w.listen("changes of routing", unix.NETLINK_ROUTE, w.routing(), unix.RTNLGRP_LINK,
			unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE,
			unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE),
		w.listen("the kernel's audit records", unix.NETLINK_AUDIT, w.records, unix.AUDIT_NLGRP_READLOG),
	)
}

// Changes are those of others, as they come.
func (w *Watch) Changes() <-chan dataplane.ExternalChange { return w.changes }

// Pause has the kernel tell nothing of nf_tables until resume was called as often. It spends more time on telling of an
// element than on adding it: two microseconds. The next audit finds changes by other programs.
func (w *Watch) Pause() (resume func()) {
	w.pause(1, unix.NETLINK_DROP_MEMBERSHIP)
	return func() { w.pause(-1, unix.NETLINK_ADD_MEMBERSHIP) }
}

// pause leaves the group with the first pause, and joins it with the end of the last one.
func (w *Watch) pause(more, option int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.pauses += more
	if w.nft == nil || more > 0 && w.pauses > 1 || more < 0 && w.pauses > 0 {
		return
	}
	raw, err := w.nft.SyscallConn()
	if err != nil {
		return // it is closed
	}
	_ = raw.Control(func(fd uintptr) {
		err := unix.SetsockoptInt(int(fd), unix.SOL_NETLINK, option, unix.NFNLGRP_NFTABLES)
		if err != nil {
			w.notify(dataplane.ExternalChange{What: "more changes of nf_tables than could be followed"})
		}
	})
}

// Close ends the listening.
func (w *Watch) Close() {
	close(w.closing)
	for _, s := range w.sockets {
		_ = s.Close()
	}
	w.running.Wait()
}

func (w *Watch) listen(what string, protocol int, handle func(syscall.NetlinkMessage), groups ...uint) error {
	s, err := nfnetlink.Subscribe(protocol, unix.SOCK_NONBLOCK, buffer, groups...)
	if err != nil {
		return fmt.Errorf("subscribe to %s: %w", what, err)
	}
	w.sockets = append(w.sockets, s)
	w.running.Go(func() { w.read(s, what, handle) })
	return nil
}

// read hears messages until the socket is closed. All datagrams come into the same memory: the plane's own changes can
// be many megabytes of them.
func (w *Watch) read(s *os.File, what string, handle func(syscall.NetlinkMessage)) {
	datagram := make([]byte, datagramSize)
	for {
		n, err := s.Read(datagram)
		switch {
		case errors.Is(err, unix.ENOBUFS):
			w.notify(dataplane.ExternalChange{What: "more " + what + " than could be followed"})
		case err != nil:
			select {
			case <-w.closing:
				return
			case <-time.After(pause):
			}
		default:
			for m := range nfnetlink.Messages(datagram[:n]) {
				handle(m)
			}
		}
	}
}

// notify does not wait for the reader.
func (w *Watch) notify(f dataplane.ExternalChange) {
	select {
	case w.changes <- f:
	default:
	}
}

// self tells this process from others.
type self struct {
	comm    string
	initial bool // the numbers of processes that the kernel tells are those that we see
}

// initialPIDs is the number of the first namespace of processes (PROC_PID_INIT_INO in the kernel's
// include/linux/proc_ns.h).
const initialPIDs = "pid:[4026531836]"

func whoWeAre() self {
	comm, _ := os.ReadFile("/proc/self/comm") // without it all are others
	namespace, _ := os.Readlink("/proc/self/ns/pid")
	return self{strings.TrimSpace(string(comm)), namespace == initialPIDs}
}

// is reports whether a process is this one. The number may be that of one of its threads. In a container of its own it
// does not know its number, and goes by its name.
func (s self) is(f dataplane.ExternalChange) bool {
	if f.Process != s.comm {
		return false
	}
	if !s.initial {
		return true
	}
	_, err := os.Stat("/proc/self/task/" + strconv.Itoa(f.PID))
	return err == nil
}

// named finds the name of a process that is still there.
func (s self) named(f dataplane.ExternalChange) dataplane.ExternalChange {
	comm, err := os.ReadFile("/proc/" + strconv.Itoa(f.PID) + "/comm")
	if err == nil {
		f.Process = strings.TrimSpace(string(comm))
	}
	return f
}
