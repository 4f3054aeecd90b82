package takeover

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
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
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(busyInterval):
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
	err = t.here.do(func() error {
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
func existingSets(f family) ([]string, error) {
	if !mayAsk("ip_set") {
		return nil, nil
	}
	var names []string
	for _, name := range f.sets() {
		_, err := setRequest(nl.IPSET_CMD_HEADER, unix.NLM_F_ACK, name).Execute(unix.NETLINK_NETFILTER, 0)
		switch {
		case err == nil:
			names = append(names, name)
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP): // a kernel without ip sets
			return nil, nil
		case !errors.Is(err, unix.ENOENT):
			return names, fmt.Errorf("ipset %s: %w", name, err)
		}
	}
	return names, nil
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
	err := whileBusy(ctx, func() error { return setError(netlink.IpsetDestroy(name)) })
	switch {
	case err == nil, errors.Is(err, unix.ENOENT):
		return nil
	case errors.Is(err, unix.EBUSY):
		err = fmt.Errorf("%w: rules that kube-proxy did not make refer to it (iptables-save | grep %s); "+
			"delete them and run fairlead clean", err, name)
	}
	return fmt.Errorf("delete ipset %s: %w", name, err)
}

// setError makes the kernel's own number for a set in use an ordinary one.
func setError(err error) error {
	if errors.Is(err, nl.IPSetError(nl.IPSET_ERR_BUSY)) {
		return unix.EBUSY
	}
	return err
}

// servedPort is a port of one protocol; 0 is all of them.
type servedPort struct {
	protocol uint8
	port     uint16
}

// setPorts are the ports in a set, with the protocol of those that have one.
func setPorts(name string) ([]servedPort, error) {
	messages, err := setRequest(nl.IPSET_CMD_LIST, unix.NLM_F_DUMP, name).Execute(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		return nil, fmt.Errorf("list ipset %s: %w", name, err)
	}
	return parsePorts(messages), nil
}

func parsePorts(messages [][]byte) (ports []servedPort) {
	for _, m := range messages {
		for _, member := range nested(inMessage(m)[nl.IPSET_ATTR_ADT]) {
			a := attributes(member)
			if port := a[nl.IPSET_ATTR_PORT]; len(port) == 2 {
				p := servedPort{port: binary.BigEndian.Uint16(port)}
				if protocol := a[nl.IPSET_ATTR_PROTO]; len(protocol) == 1 {
					p.protocol = protocol[0]
				}
				ports = append(ports, p)
			}
		}
	}
	return ports
}

func setRequest(command, flags int, name string) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_IPSET<<8|command, flags)
	r.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_NETLINK, Version: nl.NFNETLINK_V0})
	r.AddData(nl.NewRtAttr(nl.IPSET_ATTR_PROTOCOL, nl.Uint8Attr(nl.IPSET_PROTOCOL)))
	r.AddData(nl.NewRtAttr(nl.IPSET_ATTR_SETNAME, nl.ZeroTerminated(name)))
	return r
}
