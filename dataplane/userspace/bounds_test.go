package userspace_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/userspace"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/testbed"
)

const fewFilesVariable = "FAIRLEAD_TEST_FEW_FILES" // the test that runs in a process of its own

// fewFiles runs the calling test again in a process of its own, and reports whether this is that one.
func fewFiles(t *testing.T) bool {
	t.Helper()
	if os.Getenv(fewFilesVariable) == t.Name() {
		return true
	}
	self := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v")
	self.Env = append(os.Environ(), fewFilesVariable+"="+t.Name())
	out, err := self.CombinedOutput()
	switch {
	case err == nil && strings.Contains(string(out), "--- SKIP: "+t.Name()):
		lack.Inherit(t, out)
	case err != nil:
		t.Fatalf("%v\n%s", err, out)
	}
	return false
}

// TestBound_files: before the last file is open clients are reset, and counted. If none is left they still are.
func TestBound_files(t *testing.T) {
	if !fewFiles(t) {
		return
	}
	n := start(t, userspace.Options{})
	n.sync("tcp", n.greeting())
	client := n.socketOfClient()
	setFiles(t, len(openNow(t))+160)
	var open []*net.TCPConn
	for n.greets(&open) {
	}
	n.counts("refused 10.96.0.10:80/tcp reject 1 table-full\n", " full 1\n", "dials failed 0 retried 0 unanswered 0\n")
	rest := allFiles(t)
	if err := n.connectTo(client); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("without any file: %v", err)
	}
	for _, f := range rest {
		f.Close()
	}
	n.counts("refused 10.96.0.10:80/tcp reject 1 table-full\n", " full 2\n")
	for _, c := range open {
		c.Close()
	}
	for !n.greets(&open) { // until the proxy has seen the end
	}
}

// TestBound_connections: of 20,000 files, four fifths are for connections.
func TestBound_connections(t *testing.T) {
	if !fewFiles(t) {
		return
	}
	setFiles(t, 20000)
	n := start(t, userspace.Options{})
	n.sync("tcp", n.greeting())
	n.counts("table connections capacity 8000 ")
}

// TestBound_pipes: pipes are lent only while they carry something, and only few at a time.
func TestBound_pipes(t *testing.T) {
	if !fewFiles(t) {
		return
	}
	const connections = 40
	setFiles(t, 4*connections) // for the plane
	n := start(t, userspace.Options{})
	n.sync("tcp", n.listen(func(c *net.TCPConn) { go discard(c) }))
	setFiles(t, 20*connections) // for the ends of the connections, too
	var group sync.WaitGroup
	defer group.Wait()
	for range connections {
		var c net.Conn
		n.at("client", func() (err error) {
			c, err = net.DialTimeout("tcp4", service, eventually.Patience())
			return err
		})
		group.Go(func() {
			data := make([]byte, 1<<20)
			for _, err := c.Write(data); err == nil; _, err = c.Write(data) {
			}
		})
		defer c.Close()
	}
	most := 0
	for range connections {
		eventually.Nil(t, "streams through pipes", func() error {
			now := pipesNow(t)
			most = max(most, now)
			if now == 0 {
				return errors.New("there is none")
			}
			return nil
		})
	}
	if perConnection := 2 + float64(most)/connections; perConnection > 2.4 {
		t.Errorf("%.2f files for each connection", perConnection)
	}
}

// pipesNow is how many files of this process are ends of pipes.
func pipesNow(t *testing.T) (n int) {
	for _, f := range openNow(t) {
		if to, err := os.Readlink("/proc/self/fd/" + f.Name()); err == nil && strings.HasPrefix(to, "pipe:") {
			n++
		}
	}
	return n
}

// greeting is a backend that says something and then nothing.
func (n *node) greeting() string {
	var mu sync.Mutex
	var held []net.Conn
	n.Cleanup(func() {
		mu.Lock()
		defer mu.Unlock()
		for _, c := range held {
			c.Close()
		}
	})
	return n.listen(func(c *net.TCPConn) {
		mu.Lock()
		defer mu.Unlock()
		held = append(held, c)
		_, _ = c.Write([]byte{1}) // a client without it reports that
	})
}

// greets opens a connection, and reports whether it was served. It is to be reset else.
func (n *node) greets(open *[]*net.TCPConn) bool {
	n.Helper()
	var c net.Conn
	err := n.bed.Do("client", func() (err error) {
		c, err = net.DialTimeout("tcp4", service, eventually.Patience())
		return err
	})
	if err == nil {
		*open = append(*open, c.(*net.TCPConn))
		n.Cleanup(func() { c.Close() })
		_ = c.SetDeadline(time.Now().Add(eventually.Patience())) // fails only if it is closed
		_, err = c.Read(make([]byte, 1))
	}
	if err != nil && !errors.Is(err, unix.ECONNRESET) {
		n.Fatal(err)
	}
	return err == nil
}

// counts waits until the counters say so: a client may hear of its end before that is counted.
func (n *node) counts(wanted ...string) {
	n.Helper()
	eventually.Nil(n, "counters", func() error {
		counters, err := n.plane.Counters(n.Context())
		lacks := func(want string) bool { return !strings.Contains(counters.String(), want) }
		if err == nil && slices.ContainsFunc(wanted, lacks) {
			err = fmt.Errorf("not all of %q in:\n%s", wanted, counters)
		}
		return err
	})
}

// socketOfClient makes a socket that is not connected yet.
func (n *node) socketOfClient() (fd int) {
	n.Helper()
	n.at(testbed.Place("client"), func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		return err
	})
	n.Cleanup(func() { unix.Close(fd) })
	wait := unix.NsecToTimeval(eventually.Patience().Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait); err != nil {
		n.Fatal(err)
	}
	return fd
}

// connectTo connects it with the Service and reads.
func (n *node) connectTo(fd int) error {
	err := unix.Connect(fd, &unix.SockaddrInet4{Addr: [4]byte{10, 96, 0, 10}, Port: 80})
	if err == nil {
		_, err = unix.Read(fd, make([]byte, 1))
	}
	return err
}

func openNow(t *testing.T) []os.DirEntry {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func setFiles(t *testing.T, most int) {
	t.Helper()
	var limit unix.Rlimit
	err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit)
	if err == nil {
		limit.Cur, limit.Max = uint64(most), max(limit.Max, uint64(most))
		err = unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// allFiles opens all that may be opened.
func allFiles(t *testing.T) (all []*os.File) {
	t.Helper()
	for {
		f, err := os.Open(os.DevNull)
		if errors.Is(err, unix.EMFILE) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, f)
	}
}

// TestDial_noPort: that the machine has no port left for a backend is not the backend's fault. Another one is asked, and
// when a port is free it has its turn.
func TestDial_noPort(t *testing.T) {
	n := start(t, userspace.Options{Redirect: userspace.ByTPROXY})
	n.at(testbed.Node, func() error {
		return os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte("40000 40000"), 0)
	})
	n.sync("tcp", n.greeting(), n.greeting())
	var open []*net.TCPConn
	served := 0
	for n.greets(&open) {
		served++
	}
	if served != 2 {
		t.Fatalf("%d connections: there is one port for each backend, and nobody else has it", served)
	}
	n.counts("dials failed 0 retried 0 unanswered 1\n")
	reset(t, open[0])
	for !n.greets(&open) { // until the proxy has seen the end
	}
	n.counts("dials failed 0 ")
}

// reset closes a connection at once, so that its peers need not wait for the rest of it.
func reset(t *testing.T, c *net.TCPConn) {
	t.Helper()
	if err := errors.Join(c.SetLinger(0), c.Close()); err != nil {
		t.Fatal(err)
	}
}
