package daemon

import (
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"regexp"

	"golang.org/x/sys/unix"
)

// presence begins the names of abstract Unix sockets. These belong to the network namespace, whatever else
// containers do not share, and vanish with their process: who cleans up sees that somebody would put all of
// it back. Anybody may open such sockets. So each process has a name of its own, which nobody can have
// taken, and those count on which somebody listens who can program the kernel.
const presence = "@fairlead/"

// ErrRunning says that a Fairlead runs in this network namespace.
var ErrRunning = errors.New("a Fairlead runs here, and would put back what is removed; stop it first")

// announce tells others in this network namespace of this process until the socket is closed.
func announce() (net.Listener, error) {
	l, err := net.Listen("unix", presence+rand.Text())
	if err != nil {
		return nil, err
	}
	go hangUp(l)
	return l, nil
}

// hangUp keeps the queue of a socket empty.
func hangUp(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		_ = c.Close()
	}
}

// Alone returns an error that wraps ErrRunning if there is a Fairlead in this network namespace.
func Alone() error {
	// Names may hold whatever somebody likes, line breaks too: what looks like ours is asked.
	sockets, err := os.ReadFile("/proc/thread-self/net/unix")
	if err != nil {
		return fmt.Errorf("see whether a Fairlead runs here: %w", err)
	}
	for _, name := range regexp.MustCompile(presence+`[A-Z2-7]+`).FindAll(sockets, -1) {
		switch who := listener(string(name)); {
		case who == nil || !canProgram(who):
		case who.Pid == 0:
			return fmt.Errorf("%w (it is in another container)", ErrRunning)
		default:
			return fmt.Errorf("%w (process %d)", ErrRunning, who.Pid)
		}
	}
	return nil
}

// listener is who listens on a Unix socket; nil: nobody.
func listener(name string) (who *unix.Ucred) {
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: name, Net: "unix"})
	if err != nil {
		return nil
	}
	defer conn.Close()
	raw, err := conn.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { who, _ = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	}
	if err != nil {
		return nil
	}
	return who
}

// canProgram reports whether a process is root's, or has CAP_NET_ADMIN in this user namespace: in one of
// his own everybody has it.
func canProgram(who *unix.Ucred) bool {
	if who.Uid == 0 || who.Pid == 0 { // of a process of another container nothing but the user is known
		return who.Uid == 0
	}
	theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/user", who.Pid))
	if ours, err2 := os.Readlink("/proc/self/ns/user"); err != nil || err2 != nil || theirs != ours {
		return false
	}
	var sets [2]unix.CapUserData
	err = unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3, Pid: who.Pid}, &sets[0])
	return err == nil && sets[0].Effective&(1<<unix.CAP_NET_ADMIN) != 0
}
