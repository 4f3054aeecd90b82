package takeover

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nfnetlink"
)

// mayAsk reports whether asking a module of the kernel loads it. A kernel without modules loads none.
func mayAsk(module string) bool {
	_, loaded := os.Stat("/sys/module/" + module)
	_, modules := os.Stat("/proc/modules")
	return loaded == nil || errors.Is(modules, os.ErrNotExist)
}

// The kernel gives up what a deleted rule referred to after a grace period.
const (
	busyTries    = 100
	busyInterval = 50 * time.Millisecond
)

// whileBusy repeats f until the object it deletes is no longer referred to.
func whileBusy(ctx context.Context, f func() error) error {
	for range busyTries {
		if err := f(); !errors.Is(err, unix.EBUSY) {
			return err
		}
		if err := pause(ctx, busyInterval, time.Time{}); err != nil {
			return err
		}
	}
	return f()
}

// ipSets are those of mode ipvs, to which its iptables rules refer.
type ipSets struct{}

func (ipSets) find(context.Context) ([]Leftover, error) {
	var found []Leftover
	dummy, err := findDummy("")
	errs := []error{err}
	for _, f := range families {
		names, err := existingSets(f)
		errs = append(errs, err)
		if len(names) > 0 {
			found = append(found,
				Leftover{Backend: "ipset", Family: f.name, What: "sets", Count: len(names), Until: dummy.until()})
		}
	}
	return found, errors.Join(errs...)
}

// servingSet is one that kube-proxy's mode ipvs always has, and Remove never leaves.
const servingSet = "CLUSTER-IP"

// UsesIPVS reports whether kube-proxy serves in mode ipvs, or has done so since Remove.
func (t *Takeover) UsesIPVS() (uses bool, err error) {
	err = t.here.Do(func() error {
		for _, f := range families {
			names, err := existingSets(f)
			if err != nil {
				return err
			}
			uses = uses || slices.Contains(names, f.setsName+servingSet)
		}
		return nil
	})
	return uses, err
}

// existingSets asks for the header of each set, not for its members.
func existingSets(f family) (names []string, err error) {
	if !mayAsk("ip_set") {
		return nil, nil
	}
	err = netfilter(func(c *nfnetlink.Socket) error {
		for _, name := range f.sets() {
			err := c.Get(nfnetlink.IPSet(nl.IPSET_CMD_HEADER, name, func([]byte) {}))
			switch {
			case err == nil:
				names = append(names, name)
			case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP): // a kernel without ip sets
				return nil
			case !errors.Is(err, unix.ENOENT):
				return fmt.Errorf("ipset %s: %w", name, err)
			}
		}
		return nil
	})
	return names, err
}

// netfilter calls f with a socket.
func netfilter(f func(*nfnetlink.Socket) error) error {
	c, err := nfnetlink.Dial()
	if err != nil {
		return err
	}
	defer c.Close() // everything has been answered
	return f(c)
}

// remove leaves those that IPVS needs to drain.
func (ipSets) remove(ctx context.Context) error {
	dummy, err := findDummy("")
	errs := []error{err}
	for _, f := range families {
		names, err := existingSets(f)
		errs = append(errs, err)
		for _, name := range names {
			if _, needed := f.nodePortSets()[name]; !needed || dummy.until().IsZero() {
				errs = append(errs, destroySet(ctx, name))
			}
		}
	}
	return errors.Join(errs...)
}

func destroySet(ctx context.Context, name string) error {
	err := whileBusy(ctx, func() error {
		err := netfilter(func(c *nfnetlink.Socket) error { return c.Do(nfnetlink.IPSet(nl.IPSET_CMD_DESTROY, name, nil)) })
		if errors.Is(err, syscall.Errno(nl.IPSET_ERR_BUSY)) { // ipset's own number for a set in use
			return unix.EBUSY
		}
		return err
	})
	switch {
	case err == nil, errors.Is(err, unix.ENOENT):
		return nil
	case errors.Is(err, unix.EBUSY):
		err = fmt.Errorf("%w: rules that kube-proxy did not make refer to it (iptables-save | grep %s); "+
			"delete them and run fairlead clean", err, name)
	}
	return fmt.Errorf("delete ipset %s: %w", name, err)
}

// servedPort is a port of one protocol.
type servedPort struct {
	protocol uint8
	port     uint16
}

// setPorts are the ports in a set.
func setPorts(name string) (ports []uint16, err error) {
	r := nfnetlink.IPSet(nl.IPSET_CMD_LIST, name, func(attrs []byte) { ports = append(ports, portsIn(attrs)...) })
	r.Reset = func() { ports = nil }
	if err = netfilter(func(c *nfnetlink.Socket) error { return c.Dump(r) }); err != nil {
		return nil, fmt.Errorf("list ipset %s: %w", name, err)
	}
	return ports, nil
}

func portsIn(attrs []byte) (ports []uint16) {
	nfnetlink.Attributes(nfnetlink.Attribute(attrs, nl.IPSET_ATTR_ADT), func(_ uint16, member []byte) {
		if port := nfnetlink.Attribute(member, nl.IPSET_ATTR_PORT); len(port) == 2 {
			ports = append(ports, binary.BigEndian.Uint16(port))
		}
	})
	return ports
}
