package daemon

import (
	cryptorand "crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// presence begins the names of abstract Unix sockets. These belong to the network namespace, whatever else
// containers do not share. The kernel removes them with their process, so that no name is ever stale. Any local
// user may open such sockets. So each process has a random name, which no other program can have taken before, and
// only those names count on which a process listens that can program the kernel.
const presence = "@fairlead/"

// here is where there may be one Fairlead only.
const here = "in this network namespace"

const (
	// acceptPause bounds the processor time that connections of local users to the socket cost.
	acceptPause = time.Millisecond
	// dialPatience bounds the time that full queues cost in one look. Any local user can open such sockets.
	dialPatience = time.Second
)

// tryClaim announces this process unless there is another Fairlead. It looks again after that: of two processes that
// start at once one at least sees the other, and withdraws. If both do, their pauses differ.
func tryClaim() (io.Closer, *rival, error) {
	if other, _ := findRival(""); other != nil { // the second look returns the error
		return nil, other, nil
	}
	l, err := announce()
	if err != nil {
		return nil, nil, err
	}
	other, err := findRival(l.Addr().String())
	if other != nil {
		return nil, other, l.Close()
	}
	return l, nil, err
}

// announce tells others in this network namespace of this process until the socket is closed.
func announce() (net.Listener, error) {
	l, err := net.Listen("unix", presence+cryptorand.Text())
	if err != nil {
		return nil, err
	}
	go hangUp(l)
	return l, nil
}

// hangUp empties the queue of a socket until that is closed. Where the process has no file left, it tries again.
func hangUp(l net.Listener) {
	for {
		c, err := l.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err == nil:
			_ = c.Close()
		}
		time.Sleep(acceptPause)
	}
}

// rival is another Fairlead in this network namespace.
type rival struct {
	socket string // its name
	pid    int    // 0: the process has none in this pid namespace
}

// String says which process it is, and which namespaces it does not share with this one.
func (r *rival) String() string {
	if r.pid == 0 {
		return "it is in another pid namespace, so that its pid is not known here (\"ss -xlp | grep " + r.socket +
			"\" on the node shows the pid)"
	}
	text := fmt.Sprintf("process %d", r.pid)
	if apart := r.apart(); len(apart) > 0 {
		text += ", in another " + strings.Join(apart, " and ") + " namespace"
	}
	return text
}

// apart are the kinds of namespaces that the process does not share with this one, as far as this one may look.
func (r *rival) apart() (kinds []string) {
	for kind, file := range map[string]string{"mount": "mnt", "pid": "pid"} {
		theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", r.pid, file))
		if ours, err2 := os.Readlink("/proc/self/ns/" + file); err == nil && err2 == nil && theirs != ours {
			kinds = append(kinds, kind)
		}
	}
	slices.Sort(kinds)
	return kinds
}

// Alone returns an error that wraps ErrRunning if there is a Fairlead in this network namespace.
func Alone() error {
	other, err := findRival("")
	if other != nil {
		return fmt.Errorf("%w (%s)", ErrRunning, other)
	}
	return err
}

// findRival returns a Fairlead in this network namespace that does not listen on the socket own; nil: there is none.
func findRival(own string) (*rival, error) {
	// Names may hold any bytes, line breaks too: what looks like ours is asked.
	sockets, err := os.ReadFile("/proc/thread-self/net/unix")
	if err != nil {
		return nil, fmt.Errorf("see whether a Fairlead runs here: %w", err)
	}
	until := time.Now().Add(dialPatience)
	for _, name := range regexp.MustCompile(presence+`[A-Z2-7]+`).FindAllString(string(sockets), -1) {
		if name == own {
			continue
		}
		if who := listener(name, until); who != nil && canProgram(who) {
			return &rival{socket: name, pid: int(who.Pid)}, nil
		}
	}
	return nil, nil
}

// listener is the process that listens on a Unix socket; nil: none does. While the socket's queue is full, it tries
// again until a time.
func listener(name string, until time.Time) (who *unix.Ucred) {
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: name, Net: "unix"})
	for errors.Is(err, unix.EAGAIN) && time.Now().Before(until) {
		time.Sleep(acceptPause / 10)
		conn, err = net.DialUnix("unix", nil, &net.UnixAddr{Name: name, Net: "unix"})
	}
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

// canProgram reports whether a process has CAP_NET_ADMIN in this user namespace; in a namespace of their own all users
// have it. Of a process in another pid namespace only the user is known, which must be root.
func canProgram(who *unix.Ucred) bool {
	var sets [2]unix.CapUserData
	known := who.Pid != 0 &&
		unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3, Pid: who.Pid}, &sets[0]) == nil
	may := sets[0].Effective&(1<<unix.CAP_NET_ADMIN) != 0
	if who.Uid == 0 {
		return may || !known
	}
	if !may {
		return false
	}
	theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/user", who.Pid))
	ours, err2 := os.Readlink("/proc/self/ns/user")
	return err == nil && err2 == nil && theirs == ours
}
