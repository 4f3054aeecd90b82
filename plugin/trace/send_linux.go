package trace

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/thread"
	"fairlead.dev/fairlead/model"
)

// Sender is a network namespace.
type Sender struct{ namespace string } // a file; empty: this one

// Find finds a sender: node, netns:PATH, netns:PID, or pod/NAMESPACE/NAME.
func Find(text string) (Sender, error) {
	if text == "node" {
		return Sender{}, nil
	}
	if rest, ok := strings.CutPrefix(text, "netns:"); ok {
		if _, err := strconv.Atoi(rest); err == nil {
			rest = "/proc/" + rest + "/ns/net"
		}
		_, err := os.Stat(rest)
		return Sender{rest}, err
	}
	if rest, ok := strings.CutPrefix(text, "pod/"); ok {
		namespace, name, ok := strings.Cut(rest, "/")
		if !ok {
			return Sender{}, fmt.Errorf("%q is not pod/NAMESPACE/NAME", text)
		}
		return search(namespace, name)
	}
	return Sender{}, fmt.Errorf("%q is none of node, pod/NAMESPACE/NAME, netns:PATH and netns:PID", text)
}

// search finds the network namespace of a pod's processes.
func search(namespace, name string) (Sender, error) {
	here, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		return Sender{}, err
	}
	processes, _ := filepath.Glob("/proc/[0-9]*") // the pattern is valid
	found := map[string]string{}
	for _, p := range processes {
		file := filepath.Join(p, "ns/net")
		if at, err := os.Readlink(file); err == nil && found[at] == "" && runsPod(p, namespace, name) {
			found[at] = file
		}
	}
	switch {
	case len(found) == 0:
		return Sender{}, fmt.Errorf("no process of pod/%s/%s is seen here; run this on its node, as root and outside of "+
			"containers, or name netns:PID", namespace, name)
	case len(found) > 1:
		return Sender{}, fmt.Errorf("processes of pod/%s/%s are in %d network namespaces; name netns:PID", namespace, name,
			len(found))
	case found[here] != "":
		return Sender{}, nil
	}
	for _, file := range found {
		return Sender{file}, nil
	}
	return Sender{}, nil
}

// runsPod reports whether a process is of a pod: the name of its host is the pod's, and its service account has the
// namespace.
func runsPod(process, namespace, name string) bool {
	environment, _ := os.ReadFile(filepath.Join(process, "environ")) // the process may have ended
	if !slices.Contains(strings.Split(string(environment), "\x00"), "HOSTNAME="+name) {
		return false
	}
	account, err := os.ReadFile(filepath.Join(process, "root/var/run/secrets/kubernetes.io/serviceaccount/namespace"))
	return err != nil || string(account) == namespace
}

// do runs f in the sender's namespace.
func (s Sender) do(f func() error) error {
	if s.namespace == "" {
		return f()
	}
	done := make(chan error)
	thread.Run(func() {
		fd, err := unix.Open(s.namespace, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err == nil {
			err = unix.Setns(fd, unix.CLONE_NEWNET)
			_ = unix.Close(fd)
		}
		if err != nil {
			done <- fmt.Errorf("enter the network namespace %s: %w", s.namespace, err)
			return
		}
		done <- f()
	})
	return <-done
}

// sent is the connection, or datagram.
type sent struct {
	fd          int
	local, peer netip.AddrPort // the peer is the kernel's; invalid: it is not known
	result      string
}

func (s *sent) close() { _ = unix.Close(s.fd) }

// send sends it. begin is told before from which port.
func (s Sender) send(q Question, begin func(port uint16) error) (out *sent, err error) {
	kind := unix.SOCK_STREAM
	if q.Protocol == model.UDP {
		kind = unix.SOCK_DGRAM
	}
	family, any := unix.AF_INET, netip.IPv4Unspecified()
	if q.To.Addr().Is6() {
		family, any = unix.AF_INET6, netip.IPv6Unspecified()
	}
	out = &sent{}
	err = s.do(func() error {
		out.fd, err = unix.Socket(family, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return os.NewSyscallError("socket", err)
		}
		if err := unix.Bind(out.fd, sockaddr(netip.AddrPortFrom(any, 0))); err != nil {
			return os.NewSyscallError("bind", err)
		}
		bound, err := localOf(out.fd)
		if err == nil {
			err = begin(bound.Port())
		}
		if err != nil {
			return err
		}
		err = unix.Connect(out.fd, sockaddr(q.To))
		if out.local, _ = localOf(out.fd); err == nil || errors.Is(err, unix.EINPROGRESS) {
			out.peer = peerOf(q.Protocol, out.local)
		}
		if err == nil && q.Protocol == model.UDP {
			_, err = unix.Write(out.fd, []byte{0})
		}
		out.result, err = out.outcome(q, err)
		return err
	})
	if err != nil && out.fd > 0 {
		out.close()
	}
	return out, err
}

// outcome waits for an answer.
func (s *sent) outcome(q Question, err error) (string, error) {
	if err == nil || errors.Is(err, unix.EINPROGRESS) {
		wanted := int16(unix.POLLOUT)
		if q.Protocol == model.UDP {
			wanted = unix.POLLIN
		}
		poll := []unix.PollFd{{Fd: int32(s.fd), Events: wanted}}
		for end := time.Now().Add(q.Timeout); ; {
			n, failure := unix.Poll(poll, int(max(0, time.Until(end)).Milliseconds()))
			if n == 0 && failure == nil {
				return silent, nil
			}
			if !errors.Is(failure, unix.EINTR) {
				break
			}
		}
		code, failure := unix.GetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_ERROR)
		if err = failure; err == nil && code != 0 {
			err = unix.Errno(code)
		}
	}
	switch {
	case err == nil:
		return answered, nil
	case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETUNREACH),
		errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return refused, nil
	case errors.Is(err, unix.ETIMEDOUT):
		return silent, nil
	}
	return "", fmt.Errorf("connect to %s: %w", q.To, err)
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

func localOf(fd int) (netip.AddrPort, error) {
	a, err := unix.Getsockname(fd)
	switch a := a.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port)), nil
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr), uint16(a.Port)), nil
	}
	return netip.AddrPort{}, os.NewSyscallError("getsockname", err)
}

// peerOf is the address to which a socket of this thread's namespace really is connected. getpeername tells the one
// that its program asked for.
func peerOf(protocol model.Protocol, local netip.AddrPort) netip.AddrPort {
	file := "/proc/thread-self/net/" + strings.ToLower(protocol.String())
	if local.Addr().Is6() {
		file += "6"
	}
	text, _ := os.ReadFile(file) // without it the peer is not known
	for line := range strings.Lines(string(text)) {
		if words := strings.Fields(line); len(words) > 2 && procAddr(words[1]) == local {
			return procAddr(words[2])
		}
	}
	return netip.AddrPort{}
}

// procAddr reads an address of such a file, whose words of 32 bits are in the machine's order.
func procAddr(text string) netip.AddrPort {
	address, number, _ := strings.Cut(text, ":")
	b, err := hex.DecodeString(address)
	port, failure := strconv.ParseUint(number, 16, 16)
	for word := range slices.Chunk(b, 4) {
		copy(word, binary.BigEndian.AppendUint32(nil, binary.NativeEndian.Uint32(word)))
	}
	if a, ok := netip.AddrFromSlice(b); ok && err == nil && failure == nil {
		return netip.AddrPortFrom(a, uint16(port))
	}
	return netip.AddrPort{}
}

// deviceTo is where packets from an address come in: where those to it leave.
func deviceTo(a netip.Addr) (string, error) {
	routes, err := netlink.RouteGet(a.AsSlice())
	if err != nil || len(routes) == 0 {
		return "", fmt.Errorf("find the device of %s: %w", a, err)
	}
	link, err := netlink.LinkByIndex(routes[0].LinkIndex)
	if err != nil {
		return "", fmt.Errorf("find the device of %s: %w", a, err)
	}
	return link.Attrs().Name, nil
}
