package iptables

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"math/bits"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
)

// legacy is the back end x_tables: tables that are read and replaced as a whole.
type legacy struct {
	fault  func(string) error
	log    *slog.Logger
	fds    [2]int // sockets of both families
	lock   *os.File
	sets   setIndexes
	tables map[tableID]*blob // as last read or written

	glances int // without a closer look
}

func openLegacy(fault func(string) error, log *slog.Logger) (*legacy, error) {
	if bits.UintSize != 64 {
		return nil, fmt.Errorf("%w: back end legacy on a machine of 32 bits; use nf_tables", dataplane.ErrUnsupported)
	}
	l := &legacy{fault: fault, log: log, fds: [2]int{-1, -1}, tables: map[tableID]*blob{}}
	for i, domain := range []int{unix.AF_INET, unix.AF_INET6} {
		fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if errors.Is(err, unix.EAFNOSUPPORT) {
			continue // load will say so
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("open socket: %w", err), l.close())
		}
		l.fds[i] = fd
	}
	return l, nil
}

func (l *legacy) close() (err error) {
	for i, fd := range l.fds {
		if l.fds[i] = -1; fd >= 0 {
			err = errors.Join(err, unix.Close(fd))
		}
	}
	return err
}

func (l *legacy) use(sets setIndexes) { l.sets = sets }
func (l *legacy) tidy(tableID) error  { return nil }

// xtLock is the file that all users of x_tables lock: iptables-legacy (iptables/xshared.c), kubelet, CNI
// plug-ins. Unlike the tables it is one for all network namespaces.
const xtLock = "/run/xtables.lock"

const (
	lockInterval = 5 * time.Millisecond
	lockPatience = time.Second // then we say that we wait
)

// begin waits for the lock.
func (l *legacy) begin(ctx context.Context) error {
	f, err := os.OpenFile(xtLock, os.O_RDONLY|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("the lock of the machine's iptables: %w: in a container, mount that file of the host", err)
	}
	began := time.Now()
	for told := false; ; {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		waited := time.Since(began)
		switch {
		case err == nil && told:
			l.log.Warn("another program kept iptables locked", "lock", xtLock, "waited", waited)
			fallthrough
		case err == nil:
			l.lock = f
			return nil
		case !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR):
			return errors.Join(fmt.Errorf("lock %s: %w", xtLock, err), f.Close())
		case waited > lockPatience && !told:
			told = true
			l.log.Warn("waiting for another program that changes iptables", "lock", xtLock)
		}
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("wait for %s, which another program holds: %w", xtLock, ctx.Err()), f.Close())
		case <-time.After(lockInterval):
		}
	}
}

// end gives the lock back.
func (l *legacy) end() {
	_ = l.lock.Close()
	l.lock = nil
}

// Socket options of x_tables (include/uapi/linux/netfilter_ipv4/ip_tables.h), the same for both families.
const (
	xtSetReplace     = 64
	xtSetAddCounters = 65
	xtGetInfo        = 64
	xtGetEntries     = 65
)

// Where struct ipt_getinfo has its parts …
const (
	tableName      = 32 // bytes, in all structs
	infoHooks      = 36
	infoUnderflows = 56
	infoNumber     = 76
	infoSize       = 80
	sizeofInfo     = 84
)

// … and ipt_get_entries, ipt_replace and xt_counters_info.
const (
	getEntriesHeader  = 40
	replaceNumber     = 36
	replaceSize       = 40
	replaceHooks      = 44
	replaceUnderflows = 64
	replaceOldNumber  = 84
	replaceCounters   = 88
	replaceHeader     = 96
	countersNumber    = 32
	countersHeader    = 40
)

func (l *legacy) socket(id tableID) (fd, level int) {
	if id.v6 {
		return l.fds[1], unix.SOL_IPV6
	}
	return l.fds[0], unix.SOL_IP
}

// info is how large a table is and where its hooks are.
func (l *legacy) info(id tableID) ([]byte, error) {
	info := make([]byte, sizeofInfo)
	copy(info, id.name)
	fd, level := l.socket(id)
	if err := getOption(fd, level, xtGetInfo, info); err != nil {
		return nil, fmt.Errorf("%s: read its size: %w", id, err)
	}
	return info, nil
}

// load implements backend.
func (l *legacy) load(id tableID) (*content, error) {
	b, err := l.read(id)
	if err != nil {
		return nil, err
	}
	l.tables[id] = b
	return b.content(), nil
}

// readTries are enough: only somebody who changes the table without the lock makes a second necessary.
const readTries = 5

func (l *legacy) read(id tableID) (*blob, error) {
	fd, level := l.socket(id)
	for range readTries {
		info, err := l.info(id)
		if err != nil {
			return nil, err
		}
		size := binary.NativeEndian.Uint32(info[infoSize:])
		entries := make([]byte, getEntriesHeader+int(size))
		copy(entries, id.name)
		binary.NativeEndian.PutUint32(entries[tableName:], size)
		err = getOption(fd, level, xtGetEntries, entries)
		if errors.Is(err, unix.EAGAIN) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("%s: read its rules: %w", id, err)
		}
		b, err := parseBlob(id, info, entries[getEntriesHeader:])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", id, err)
		}
		return b, nil
	}
	return nil, fmt.Errorf("%s changes all the time", id)
}

func (l *legacy) settled() error   { return nil }
func (l *legacy) probe(bool) error { return nil } // there is no way to try

// maxGlances is after how many of them nobody relies on a glance: it does not see when somebody puts a rule in the
// place of one of ours that is as long.
const maxGlances = 60

// undisturbed implements backend.
func (l *legacy) undisturbed(tables []tableID) (bool, error) {
	if l.glances++; l.glances >= maxGlances {
		l.glances = 0
		return false, nil
	}
	for _, id := range tables {
		same, err := l.same(id)
		if !same || err != nil {
			return false, err
		}
	}
	return true, nil
}

// same reports whether a table is as last read or written. It compares sizes, and the rules of others, which
// come first in what we write. The kernel hands out the rest of the table only if somebody takes it: what is
// behind the others' rules is memory that there is not.
func (l *legacy) same(id tableID) (bool, error) {
	b := l.tables[id]
	info, err := l.info(id)
	if err != nil || b == nil || !b.ordered || !bytes.Equal(info[tableName:], b.info[tableName:]) {
		return false, err
	}
	page := os.Getpagesize()
	head := getEntriesHeader + b.foreign
	whole := (head + page - 1) / page * page
	memory, err := unix.Mmap(-1, 0, whole+page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return false, fmt.Errorf("map memory: %w", err)
	}
	defer func() { _ = unix.Munmap(memory) }()
	if err := unix.Mprotect(memory[whole:], unix.PROT_NONE); err != nil {
		return false, fmt.Errorf("protect memory: %w", err)
	}
	at := memory[whole-head : whole]
	size := binary.NativeEndian.Uint32(info[infoSize:])
	copy(at, id.name)
	binary.NativeEndian.PutUint32(at[tableName:], size)
	fd, level := l.socket(id)
	err = getLongOption(fd, level, xtGetEntries, longOption{at, getEntriesHeader + size})
	if err != nil && !errors.Is(err, unix.EFAULT) {
		return false, nil // it changed meanwhile
	}
	return b.sameForeign(at[getEntriesHeader:]), nil
}

// write implements backend, table by table. Each is replaced at once for packets. Connections are forwarded
// before others are no longer refused.
func (l *legacy) write(changes []*change) error {
	for _, c := range changes {
		if c.empty() {
			continue
		}
		if err := l.writeTable(c); err != nil {
			return err
		}
	}
	return nil
}

func (l *legacy) writeTable(c *change) error {
	same, err := l.same(c.table)
	if err != nil {
		return err
	}
	if !same {
		b, err := l.read(c.table)
		if err != nil {
			return err
		}
		l.tables[c.table] = b
	}
	old := l.tables[c.table]
	next, err := old.changed(c, l.sets)
	if err != nil {
		return err
	}
	if err := l.fault("x_tables replace"); err != nil {
		return err
	}
	if err := l.replace(old, next); err != nil {
		return err
	}
	l.tables[c.table] = next
	return nil
}

// replace puts a table in the place of another one. The kernel hands back what the old rules had counted to
// the last packet; it is added to the counters of those rules of others that stay.
func (l *legacy) replace(old, next *blob) error {
	counters := make([]byte, xtCounters*old.number)
	message := next.raw[:replaceHeader]
	clear(message)
	copy(message, next.id.name)
	binary.NativeEndian.PutUint32(message[tableName:], next.hooks)
	binary.NativeEndian.PutUint32(message[replaceNumber:], uint32(next.number))
	binary.NativeEndian.PutUint32(message[replaceSize:], uint32(len(next.raw)-replaceHeader))
	binary.NativeEndian.PutUint32(message[replaceOldNumber:], uint32(old.number))
	for h := range numHooks {
		binary.NativeEndian.PutUint32(message[replaceHooks+4*h:], next.hook[h])
		binary.NativeEndian.PutUint32(message[replaceUnderflows+4*h:], next.underflow[h])
	}
	var pin runtime.Pinner
	defer pin.Unpin()
	binary.NativeEndian.PutUint64(message[replaceCounters:], pinned(&pin, counters))
	fd, level := l.socket(next.id)
	err := setOption(fd, level, xtSetReplace, next.raw)
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EAGAIN) {
		return fmt.Errorf("%s: replace it: %w", next.id, err)
	}
	if err != nil {
		return &refusedError{fmt.Sprintf("%s with %d rules", next.id, next.number), err}
	}
	next.setInfo()
	return l.addCounters(old, next, counters)
}

func (l *legacy) addCounters(old, next *blob, counters []byte) error {
	if next.kept == nil {
		return nil
	}
	message := make([]byte, countersHeader+xtCounters*next.number)
	copy(message, next.id.name)
	binary.NativeEndian.PutUint32(message[countersNumber:], uint32(next.number))
	for to, from := range next.kept {
		copy(message[countersHeader+xtCounters*to:], counters[xtCounters*from:][:xtCounters])
	}
	fd, level := l.socket(next.id)
	if err := setOption(fd, level, xtSetAddCounters, message); err != nil {
		return fmt.Errorf("%s: put the counters of %d rules back: %w", old.id, len(next.kept), err)
	}
	return nil
}

func (l *legacy) mark(id tableID, r *rule) uint64 {
	e := &entryEncoder{v6: id.v6, sets: l.sets}
	e.rule(r)
	return hashEntry(layoutOf(id.v6), e.b, r.do.chainName())
}

func (t target) chainName() string {
	if t.verb == jump || t.verb == goTo {
		return t.name
	}
	return ""
}

// hashEntry is a number for what a rule says, without what the kernel writes into it.
func hashEntry(layout xtLayout, entry []byte, to string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write(entry[:layout.cache])
	_, _ = h.Write(entry[layout.offsets : layout.offsets+4])
	rest := entry[layout.size:]
	if to != "" { // the verdict is an offset
		rest = entry[layout.size : len(entry)-8]
	}
	_, _ = h.Write(rest)
	_, _ = h.Write([]byte(to))
	return h.Sum64()
}
