package conformance

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// node is where a plane is tried: one of a testbed, with real packets, or one of memory.
type node interface {
	Network
	// rules are all that planes have in the kernel, as text; empty: nothing.
	rules(context.Context) (string, error)
	// forget has the kernel know no connection, so that no case meets those of another.
	forget() error
	// released calls f, which closes a plane, and waits until the kernel has taken back what that had.
	released(f func() error) error
}

// Network is where packets come from, and go to. It is a testbed.Bed, or acts as one.
type Network interface {
	Do(testbed.Place, func() error) error
	Probe(context.Context, testbed.Probe) (testbed.Outcome, error)
	Dial(context.Context, testbed.Place, model.Protocol, netip.AddrPort) (net.Conn, error)
	Addr(place testbed.Place, v6 bool) netip.Addr
	Cgroup() string
	Close() error
}

// ground makes nodes, and says what opens planes on one.
type ground func(context.Context, testbed.Spec) (node, dataplane.New, error)

// onBeds has planes tried with real packets.
func onBeds(new dataplane.New) ground {
	return func(ctx context.Context, spec testbed.Spec) (node, dataplane.New, error) {
		made, err := newBed(ctx, spec)
		if err != nil {
			return nil, nil, err
		}
		return bed{made}, new, nil
	}
}

// bed is a node of a testbed.
type bed struct{ *testbed.Bed }

// rules are all that nftables holds on the node.
func (b bed) rules(ctx context.Context) (string, error) {
	out, err := b.Command(ctx, testbed.Node, "nft", "list", "ruleset").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("nft list ruleset: %w: %s", err, out)
	}
	return string(out), nil
}

// forget empties the node's connection tracking.
func (b bed) forget() error {
	return b.Do(testbed.Node, func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) })
}

// released waits for sockets. A child that a test has just started may keep copies of those of the plane for a moment,
// and their ports from the next one: the kernel closes them some time after the child's exec has let us go on
// (begin_new_exec in fs/exec.c).
func (b bed) released(f func() error) error {
	before, err := b.sockets()
	if err != nil {
		return err
	}
	if err := f(); err != nil {
		return err
	}
	open, err := openSockets()
	if err != nil {
		return err
	}
	maps.DeleteFunc(before, func(inode string, _ bool) bool { return open[inode] })
	return eventually.Poll(context.Background(), func() error {
		now, err := b.sockets()
		for inode := range before {
			if now[inode] {
				err = errors.Join(err, fmt.Errorf("socket %s of the closed plane is still open", inode))
			}
		}
		return err
	})
}

// sockets are the inodes of the sockets of TCP and UDP in the node's namespace.
func (b bed) sockets() (map[string]bool, error) {
	inodes := map[string]bool{}
	err := b.Do(testbed.Node, func() error {
		for _, name := range []string{"tcp", "tcp6", "udp", "udp6"} {
			table, err := os.ReadFile("/proc/thread-self/net/" + name)
			if err != nil {
				return err
			}
			_, rows, _ := strings.Cut(string(table), "\n") // after the names of columns
			for row := range strings.Lines(rows) {
				const inode = 9                                                                    // see net/ipv4/tcp_ipv4.c and net/ipv4/udp.c
				if columns := strings.Fields(row); len(columns) > inode && columns[inode] != "0" { // 0: the process is done with it
					inodes[columns[inode]] = true
				}
			}
		}
		return nil
	})
	return inodes, err
}

// openSockets are the inodes of those that this process has.
func openSockets() (map[string]bool, error) {
	const dir = "/proc/self/fd"
	files, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	inodes := map[string]bool{}
	for _, f := range files {
		if to, err := os.Readlink(filepath.Join(dir, f.Name())); err == nil { // else it was closed meanwhile
			inodes[strings.TrimSuffix(strings.TrimPrefix(to, "socket:["), "]")] = true
		}
	}
	return inodes, nil
}
