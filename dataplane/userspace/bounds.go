package userspace

import (
	"errors"
	"net"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

// What is bounded: connections and flows by options, and all of it by the files that the process may open. Some of
// these are kept for the rest of the process, which has to follow the cluster still.
//
//	accept ─► its number? ─ beyond the reserve: reset ─► row? ─ too many: reset ─► dial ─► its number? ─► carry
//	  └─ no number left at all: the spare one takes it, to be reset

// turnedAway is how many connections the bounds have kept out.
type turnedAway struct {
	mu     sync.Mutex
	byRow  map[model.Key]uint64 // of rows that there are; of any scope
	totals map[string]uint64    // by bound
}

func newTurnedAway() *turnedAway {
	return &turnedAway{byRow: map[model.Key]uint64{}, totals: map[string]uint64{}}
}

// count counts one. The row is nil where it is not known.
func (t *turnedAway) count(row *model.Key, bound string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.totals[bound]++
	if row != nil {
		key := *row
		key.Scope = model.Any
		t.byRow[key]++
	}
}

// forget gives up what was counted for rows that there are not any more.
func (t *turnedAway) forget(rows *directory) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for key := range t.byRow {
		if !rows.forwards(endpoint{key.AddrPort(), key.Protocol}) {
			delete(t.byRow, key)
		}
	}
}

const (
	// maxReserve is how many files are kept for the rest of the process, or an eighth of all if that is less.
	maxReserve = 256
	// dialing is the part of the reserve that those who are in already may take.
	dialing = 2
)

// files are the descriptors that the process may have. The kernel hands out the lowest number that is free, so a number
// tells how many there are.
type files struct {
	mu    sync.Mutex
	spare *os.File // open, to be closed when there is no other
}

func openFiles() *files {
	f := &files{}
	f.spare, _ = os.Open(os.DevNull) // without it clients wait until something ends
	return f
}

func (f *files) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.spare != nil {
		f.spare.Close()
	}
}

func reserve() uint64 { return min(maxReserve, maxFiles()/8) }

// scarce reports whether a client's socket leaves too little to the others.
func scarce(c syscall.RawConn) bool { return within(c, reserve()) }

// keepSome fails, as the kernel does where there is nothing left, for a socket to a backend that does.
func keepSome(_, _ string, c syscall.RawConn) error {
	if within(c, reserve()/dialing) {
		return os.NewSyscallError("socket", unix.EMFILE)
	}
	return nil
}

func within(c syscall.RawConn, reserve uint64) (is bool) {
	_ = c.Control(func(fd uintptr) { is = uint64(fd)+reserve >= maxFiles() }) // fails only if it is closed
	return is
}

// shed resets those who wait to be accepted when there is no number for them, and tells how many that was.
func (f *files) shed(l *net.TCPListener) (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	raw, err := l.SyscallConn()
	if err != nil || f.spare == nil {
		return 0
	}
	f.spare.Close()
	_ = raw.Control(func(listener uintptr) { // fails only if it is closed
		for {
			fd, _, err := unix.Accept4(int(listener), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
			if err != nil {
				return
			}
			_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
			unix.Close(fd)
			n++
		}
	})
	f.spare, _ = os.Open(os.DevNull)
	return n
}

// isExhausted reports whether something is missing because the process, or the machine, may open no more files.
func isExhausted(err error) bool { return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) }

// isOwn reports whether an error says nothing of the backend: this machine cannot, or may not, ask it. There may be
// no port left for it, no memory, or rules that keep the process from it.
func isOwn(err error) bool {
	for _, own := range []error{unix.EADDRNOTAVAIL, unix.EADDRINUSE, unix.ENOBUFS, unix.ENOMEM, unix.EPERM, unix.EACCES} {
		if errors.Is(err, own) {
			return true
		}
	}
	return isExhausted(err)
}
