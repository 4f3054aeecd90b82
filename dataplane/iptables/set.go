package iptables

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/xt"
)

// setIndexes are the kernel's numbers of ipsets, by which rules refer to them.
type setIndexes map[string]uint16

const (
	setPrefix = "KUBE-CLIENTS-"
	// maxClients bounds the clients that are remembered for the backends of a pool together, and so the kernel's
	// memory. No pool has room in the sets of another one.
	maxClients = 1 << 18
	// leastClients is for how many each backend has room in any case.
	leastClients = 1 << 10
)

// ipsets are those of the plane's network namespace. They remember the clients of backends: exactly, and as
// many as there are, where xt_recent holds a hundred for each backend.
type ipsets struct {
	conn    *nfnetlink.Socket
	numbers xt.Socket // answers for the numbers of sets
	indexes setIndexes
	fault   func(string) error
}

func openIPSets(fault func(string) error) (*ipsets, error) {
	c, err := nfnetlink.Dial()
	if err != nil {
		return nil, err
	}
	numbers, err := xt.Open(false)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open socket: %w", err), c.Close())
	}
	return &ipsets{conn: c, numbers: numbers, indexes: setIndexes{}, fault: fault}, nil
}

// need makes those of the sets that are missing. It goes on after an error that is about one set. Rules refer to sets
// by numbers, which the kernel gives out, so a set must be there before the rules are encoded.
func (s *ipsets) need(v6 bool, needed map[string]setUse) error {
	var errs []error
	for _, name := range s.missing(needed) {
		if err := s.fault("ipset create"); err != nil {
			return err
		}
		if err := s.create(v6, name, needed[name]); err != nil {
			errs = append(errs, &refusedError{fmt.Sprintf("ipset %s for the %s", name, needed[name]), err})
		}
	}
	return errors.Join(errs...)
}

// missing are the sets to make, those of groups first: of their members only those that there are know clients.
func (s *ipsets) missing(needed map[string]setUse) []string {
	var groups, others []string
	for name, use := range needed {
		if _, ok := s.indexes[name]; ok {
			continue
		}
		if use.group() {
			groups = append(groups, name)
		} else {
			others = append(others, name)
		}
	}
	return append(groups, others...)
}

// without leaves out the rules that refer to sets that could not be made.
func (s *ipsets) without(rules []rule) []rule {
	missing := func(set string) bool {
		_, ok := s.indexes[set]
		return set != "" && !ok
	}
	bad := func(r rule) bool { return missing(r.set) || r.do.verb == remember && missing(r.do.name) }
	if !slices.ContainsFunc(rules, bad) {
		return rules
	}
	return slices.DeleteFunc(slices.Clone(rules), bad)
}

func (s *ipsets) create(v6 bool, name string, use setUse) error {
	const kind, revision = "hash:ip", 1
	family := byte(unix.AF_INET)
	if v6 {
		family = unix.AF_INET6
	}
	r := nfnetlink.IPSet(nl.IPSET_CMD_CREATE, name, nil)
	r.Filter.Text(nl.IPSET_ATTR_TYPENAME, kind)
	r.Filter.Bytes(nl.IPSET_ATTR_REVISION, []byte{revision})
	r.Filter.Bytes(nl.IPSET_ATTR_FAMILY, []byte{family})
	data := r.Filter.Open(nl.IPSET_ATTR_DATA)
	r.Filter.Uint32(nl.IPSET_ATTR_MAXELEM|unix.NLA_F_NET_BYTEORDER, use.most)
	r.Filter.Uint32(nl.IPSET_ATTR_TIMEOUT|unix.NLA_F_NET_BYTEORDER, target{expire: use.expire}.seconds())
	r.Filter.Close(data)
	if err := s.conn.Do(r); err != nil {
		return err
	}
	if err := s.learn(name, use.members); err != nil {
		return errors.Join(err, s.destroy(name)) // so that it is made and taught another time
	}
	index, err := s.numbers.SetIndex(name)
	if err == nil {
		s.indexes[name] = index
	}
	return err
}

// learn puts the clients of a new group's members into its set: a pool that grew, or rules of a former release, had
// none. A client that first comes between this and the new rules may get another backend the next time.
func (s *ipsets) learn(name string, members []string) error {
	add := s.batches(nl.IPSET_CMD_ADD)
	for _, member := range members {
		if _, ok := s.indexes[member]; !ok {
			continue
		}
		left := map[netip.Addr]time.Duration{}
		if err := s.clients(member, func(client netip.Addr, d time.Duration) { left[client] = d }); err != nil {
			return fmt.Errorf("list ipset %s: %w", member, err)
		}
		for client, d := range left {
			if err := add.entry(name, client, d); err != nil {
				return err
			}
		}
	}
	return add.flush()
}

// list are the sets of ours that the kernel holds.
func (s *ipsets) list() ([]string, error) {
	const listSetName = 1 << 1
	var names []string
	r := nfnetlink.IPSet(nl.IPSET_CMD_LIST, "", func(attrs []byte) {
		if name := nfnetlink.Text(attrs, nl.IPSET_ATTR_SETNAME); strings.HasPrefix(name, setPrefix) {
			names = append(names, name)
		}
	})
	r.Reset = func() { names = nil }
	r.Filter.Uint32(nl.IPSET_ATTR_FLAGS|unix.NLA_F_NET_BYTEORDER, listSetName)
	err := s.conn.Dump(r)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) { // a kernel without ip sets
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list ipsets: %w", err)
	}
	return names, nil
}

// drop deletes sets to which no rule refers any more.
func (s *ipsets) drop(names []string) error {
	var errs []error
	for _, name := range names {
		delete(s.indexes, name)
		err := s.fault("ipset destroy")
		if err == nil {
			err = s.destroy(name)
		}
		if err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("delete ipset %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

// A worker of the kernel gives up what a deleted rule of nf_tables referred to. On a busy node it takes seconds.
const (
	busyPatience = 10 * time.Second
	busyPause    = 50 * time.Millisecond // at most
)

func (s *ipsets) destroy(name string) error {
	began := time.Now()
	for pause := time.Millisecond; ; pause = min(2*pause, busyPause) {
		err := s.conn.Do(nfnetlink.IPSet(nl.IPSET_CMD_DESTROY, name, nil))
		switch {
		case !errors.Is(err, syscall.Errno(nl.IPSET_ERR_BUSY)): // ipset's own number
			return err
		case time.Since(began) > busyPatience:
			return errors.New("busy: rules that Fairlead did not make refer to it")
		}
		time.Sleep(pause)
	}
}

// know learns the numbers of the sets that there are.
func (s *ipsets) know(names []string) error {
	clear(s.indexes)
	for _, name := range names {
		index, err := s.numbers.SetIndex(name)
		if err != nil {
			return fmt.Errorf("ipset %s: %w", name, err)
		}
		s.indexes[name] = index
	}
	return nil
}

func (s *ipsets) close() error { return errors.Join(s.conn.Close(), s.numbers.Close()) }
