package testbed

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/thread"
)

// netns is an anonymous network namespace: a thread that lives in it, and a file that lets others
// enter. It has no name in the file system, so the kernel takes it away with the process, however
// that ends.
type netns struct {
	file *os.File
	link *netlink.Handle
	jobs chan func()
	in   *cgroup // may be nil
	gone chan struct{}
	once sync.Once
}

var errGone = errors.New("the place is gone")

// newNetns makes a namespace whose loopback is up.
func newNetns(sysctls []sysctl) (*netns, error) {
	n := &netns{jobs: make(chan func()), gone: make(chan struct{})}
	ready := make(chan error, 1)
	thread.Run(func() { n.live(ready) })
	if err := <-ready; err != nil {
		return nil, fmt.Errorf("make network namespace: %w", err)
	}
	if err := n.at(func() error { return n.setup(sysctls) }); err != nil {
		n.close()
		return nil, err
	}
	return n, nil
}

// live is the life of the namespace's thread.
func (n *netns) live(ready chan<- error) {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		ready <- err
		return
	}
	file, err := os.Open("/proc/thread-self/ns/net")
	n.file = file
	if ready <- err; err != nil {
		return
	}
	for {
		select {
		case job := <-n.jobs:
			job()
		case <-n.gone:
			return
		}
	}
}

func (n *netns) setup(sysctls []sysctl) error {
	err := set(sysctls, "/proc")
	if errors.Is(err, unix.EROFS) { // as in containers: a file system of its own needs CAP_SYS_ADMIN
		if f, proc, failed := detached("proc"); failed == nil {
			defer f.Close()
			err = set(sysctls, proc)
		}
	}
	if err != nil {
		return err
	}
	if n.link, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	if err := n.link.LinkSetUp(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: 1}}); err != nil {
		return fmt.Errorf("set loopback up: %w", err)
	}
	return nil
}

func (n *netns) close() {
	n.once.Do(func() {
		close(n.gone)
		n.file.Close()
		if n.link != nil {
			n.link.Close()
		}
	})
}

// join puts the namespace's thread, and those that will run its functions, into a cgroup.
func (n *netns) join(c *cgroup) error {
	n.in = c
	return n.at(c.join)
}

// at runs f on the namespace's own thread, one after the other: f must be short.
func (n *netns) at(f func() error) error {
	done := make(chan error, 1)
	select {
	case n.jobs <- func() { done <- f() }:
		return <-done
	case <-n.gone:
		return errGone
	}
}

// do runs f on a new thread inside the namespace.
func (n *netns) do(f func() error) error {
	done := make(chan error, 1)
	thread.Run(func() {
		err := errors.New("the function ended its goroutine (as t.FailNow does) instead of returning")
		defer func() { done <- err }()
		if failed := n.enter(); failed != nil {
			err = failed
			return
		}
		err = f()
	})
	return <-done
}

func (n *netns) enter() error {
	fd, err := n.file.SyscallConn()
	if err != nil {
		return errGone
	}
	var failed error
	err = fd.Control(func(fd uintptr) { failed = unix.Setns(int(fd), unix.CLONE_NEWNET) })
	if err != nil {
		return errGone
	}
	if failed != nil {
		return fmt.Errorf("enter network namespace: %w", failed)
	}
	return n.in.join()
}

// sysctl is a file below /proc/sys/net and its value. The file belongs to the namespace of the
// thread that opens it.
type sysctl struct{ path, value string }

func (s sysctl) write(proc string) error {
	err := os.WriteFile(proc+"/sys/net/"+s.path, []byte(s.value+"\n"), 0)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOENT):
		return fmt.Errorf("set sysctl: %w: this kernel lacks IPv6 or is too old", err)
	}
	return fmt.Errorf("set sysctl: %w: /proc/sys must be mounted writable", err)
}

func set(sysctls []sysctl, proc string) error {
	for _, s := range sysctls {
		if err := s.write(proc); err != nil {
			return err
		}
	}
	return nil
}

// hostSysctls suit every place.
func hostSysctls() []sysctl {
	return []sysctl{
		{"ipv6/conf/all/disable_ipv6", "0"}, // a container's may be on, and be inherited
		{"ipv6/conf/default/disable_ipv6", "0"},
		{"ipv6/conf/default/accept_dad", "0"}, // addresses can be used at once
		{"ipv6/conf/default/accept_ra", "0"},
		{"ipv6/conf/default/accept_redirects", "0"}, // all traffic keeps passing the node
		{"ipv6/conf/default/addr_gen_mode", "1"},    // link-local addresses are ours
		{"ipv4/conf/all/accept_redirects", "0"},
		{"ipv4/conf/default/accept_redirects", "0"},
		{"ipv4/conf/all/rp_filter", "0"}, // answers may take another way
		{"ipv4/conf/default/rp_filter", "0"},
		{"ipv4/icmp_ratemask", "0"}, // a refusal must never look like silence
		{"ipv6/icmp/ratemask", ""},
	}
}

// routerSysctls suit places that forward.
func routerSysctls() []sysctl {
	return append(hostSysctls(),
		sysctl{"ipv4/conf/all/send_redirects", "0"},
		sysctl{"ipv4/conf/default/send_redirects", "0"},
		sysctl{"ipv4/ip_forward", "1"},
		sysctl{"ipv6/conf/all/forwarding", "1"})
}
