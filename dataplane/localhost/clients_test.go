package localhost_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

const fewFilesVariable = "FAIRLEAD_TEST_FEW_FILES" // the test that runs in a process of its own

// fewFiles runs the calling test again in a process of its own that may open few files, and reports whether this is that
// one.
func fewFiles(t *testing.T, most uint64) bool {
	t.Helper()
	if os.Getenv(fewFilesVariable) == t.Name() {
		limit := unix.Rlimit{Cur: most, Max: most}
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
			t.Fatal(err)
		}
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

const (
	other     = "[::1]:30081"
	otherRow  = "frontend [::1]:30081/tcp internal forward other/web:http cluster6 snat always\n"
	otherPool = "pool other/web:http cluster6\nbackend other/web:http cluster6 " + podA + ":8080 local\n"
	otherDNS  = "frontend [::1]:30054/udp internal forward other/dns:dns cluster6 snat always\n" +
		"pool other/dns:dns cluster6\nbackend other/dns:dns cluster6 " + podA + ":5353 local\n"
)

// TestClients_connections: connections to one Service that stay open leave files to the process, and places to others.
func TestClients_connections(t *testing.T) {
	if !fewFiles(t, 1200) {
		return
	}
	s := newStage(t)
	s.must(both + otherRow + otherPool)
	var err error
	for range 400 {
		var c net.Conn
		if c, err = s.bed.Dial(t.Context(), testbed.Node, model.TCP, netip.MustParseAddrPort(web)); err == nil {
			t.Cleanup(func() { c.Close() })
			_ = c.SetReadDeadline(time.Now().Add(eventually.Patience())) // fails only if it is closed
			_, err = c.Read(make([]byte, 1))
		}
		if err != nil {
			break
		}
	}
	if !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("a client of many connections: %v", err)
	}
	s.reaches(other, model.TCP, "pod-a")
	s.reaches(dns, model.UDP, "pod-a", "pod-b")
}

// TestClients_flows: flows of one Service leave files to the process, and places to others.
func TestClients_flows(t *testing.T) {
	if !fewFiles(t, 1200) {
		return
	}
	s := newStage(t)
	var silent net.PacketConn
	err := s.bed.Do("pod-a", func() (err error) {
		silent, err = net.ListenPacket("udp", ":9000")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	s.must(dnsRow + "pool default/dns:dns cluster6\nbackend default/dns:dns cluster6 " + podA + ":9000\n" + otherDNS +
		webRow + webPool)
	open := s.client(model.UDP, "[::1]:30054")
	if got := s.ask(open); got != "pod-a" {
		t.Fatal(got)
	}
	for range 6000 {
		c, err := s.bed.Dial(t.Context(), testbed.Node, model.UDP, netip.MustParseAddrPort(dns))
		if err == nil {
			_, err = io.WriteString(c, "?")
			err = errors.Join(err, c.Close())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if got := s.ask(open); got != "pod-a" {
		t.Errorf("on an open flow: %s", got)
	}
	s.reaches("[::1]:30054", model.UDP, "pod-a")
	s.reaches(web, model.TCP, "pod-a", "pod-b")
}

// TestClients_listeners: NodePorts of one namespace leave sockets to those of others.
func TestClients_listeners(t *testing.T) {
	if !fewFiles(t, 400) {
		return
	}
	s := newStage(t)
	many := func(n int) string {
		rows := "pool many/web cluster6\nbackend many/web cluster6 " + podA + ":8080 local\n"
		for i := range n {
			rows += fmt.Sprintf("frontend [::1]:%d/tcp internal forward many/web cluster6 snat always\n", 31000+i)
		}
		return rows
	}
	s.must(many(60))
	for _, rows := range []string{many(1000), many(1000) + otherRow + otherPool} {
		err := s.apply(rows)
		if err == nil || !strings.Contains(err.Error(), "more than its share of the sockets") || strings.Contains(err.Error(), "other/web") {
			t.Errorf("%.300v", err)
		}
	}
	s.reaches(other, model.TCP, "pod-a")
	s.must("")
	s.must(many(60))
}

// TestClients_loop: a backend that is a relay does not have that serve itself.
func TestClients_loop(t *testing.T) {
	if !fewFiles(t, 1200) {
		return
	}
	s := newStage(t)
	s.must(webRow + "pool default/web:http cluster6\nbackend default/web:http cluster6 " + web + " local\n" + otherRow + otherPool)
	s.reaches(web, model.TCP, "refused")
	s.reaches(other, model.TCP, "pod-a")
}
