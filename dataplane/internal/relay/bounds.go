package relay

import (
	"errors"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/socket"
	"fairlead.dev/fairlead/model"
)

// These bounds are for connections and flows, and for further resources that some of them need at times. Clients,
// Services and namespaces have shares of each (package share). All bounds together leave the process the files that it
// needs to follow the cluster.
//
//	accept ─► row? ─► a place among the connections? ─ no: reset ─► dial ─► copy
//	  └─ no file left at all: the spare one takes it, to be reset

// turnedAway is what the bounds have kept out, or ended.
type turnedAway struct {
	mu    sync.Mutex
	byRow map[model.Key]uint64 // of rows that there are; of any scope
	kept  map[string]uint64    // out, by bound
	ended map[string]uint64    // for the sake of others, by bound
	fresh map[string]string    // bounds by Services of which there is something to tell
}

func newTurnedAway() *turnedAway {
	return &turnedAway{
		byRow: map[model.Key]uint64{}, kept: map[string]uint64{}, ended: map[string]uint64{}, fresh: map[string]string{},
	}
}

// count counts a connection or datagram that was kept out. The row is nil where it is not known.
func (t *turnedAway) count(d *decision, bound string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.kept[bound]++
	if d != nil {
		key := d.key
		key.Scope = model.Any
		t.byRow[key]++
		t.fresh[d.service()] = bound
	}
}

// yielded counts connections and flows that were ended.
func (t *turnedAway) yielded(service, bound string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ended[bound]++
	t.fresh[service] = bound
}

// news are the Services of which clients were kept out or ended since the last call, with the bound.
func (t *turnedAway) news() (names []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for service, bound := range t.fresh {
		names = append(names, service+" ("+bound+")")
	}
	clear(t.fresh)
	slices.Sort(names)
	return names
}

// forget gives up what was counted for rows that there are not any more.
func (t *turnedAway) forget(rows *Directory) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for key := range t.byRow {
		if !rows.Forwards(EndpointOf(key)) {
			delete(t.byRow, key)
		}
	}
}

// dialing is the part of the reserve that accepted connections may take, in case there are fewer files than was
// thought.
const dialing = 2

// files are the descriptors that the process may have.
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

// shed resets connections that wait to be accepted when there is no descriptor for them, and returns their number.
func (f *files) shed(l *socket.Conn) (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.spare == nil { // others were faster the last time
		f.spare, _ = os.Open(os.DevNull)
	}
	if f.spare == nil {
		return 0
	}
	f.spare.Close()
	_ = l.Do(func(listener int) error {
		for {
			fd, _, err := unix.Accept4(listener, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
			if err != nil {
				return err
			}
			socket.Accepted{FD: fd}.Reset()
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
	own := []error{unix.EADDRNOTAVAIL, unix.EADDRINUSE, unix.ENOBUFS, unix.ENOMEM, unix.EPERM, unix.EACCES}
	return isExhausted(err) || slices.ContainsFunc(own, func(is error) bool { return errors.Is(err, is) })
}
