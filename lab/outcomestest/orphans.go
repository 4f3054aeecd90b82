package outcomestest

import (
	"bytes"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// orphanRows have two Services with one backend each: of 1 it dies, of 2 it lives on.
const orphanRows = `
pods 10.244.0.0/16
pods fd00::af4:0/112
backend default/dies cluster 10.244.1.2:80 local
backend default/dies cluster6 [fd00::af4:102]:80 local
backend default/lives cluster 10.244.1.3:80 local
backend default/lives cluster6 [fd00::af4:103]:80 local
frontend 10.96.0.1:80/tcp any forward default/dies cluster snat SNAT
frontend 10.96.0.2:80/tcp any forward default/lives cluster snat SNAT
frontend [fd00::a60:1]:80/tcp any forward default/dies cluster6 snat SNAT
frontend [fd00::a60:2]:80/tcp any forward default/lives cluster6 snat SNAT
`

// NewOrphansBed makes a node with the backends of Orphans, and a pod that is a client.
func NewOrphansBed(t testing.TB, cgroup bool) *testbed.Bed {
	t.Helper()
	http := []testbed.PodPort{{Protocol: model.TCP, Port: 80}}
	return testbed.Need(t, testbed.Spec{Cgroup: cgroup, Pods: []testbed.PodSpec{
		{Name: "dies", Ports: http}, {Name: "lives", Ports: http}, {Name: "other", Ports: http}, {Name: "client"},
	}})
}

// Orphans are connections of clients in some places.
type Orphans struct {
	testing.TB
	Bed  *testbed.Bed
	SNAT string // whose source addresses are replaced, as in a row
	From []testbed.Place
}

// Run has both backends leave their Services in a plane. Connections are reset if their backend is dead and was sent
// something. All others live on, idle or busy.
func (r Orphans) Run(p dataplane.Dataplane) {
	r.Helper()
	t, from := r.TB, r.From
	text := strings.ReplaceAll(orphanRows, "SNAT", r.SNAT)
	before := r.parse(text)
	after := r.parse(strings.NewReplacer("10.244.1.2:", "10.244.1.4:", "10.244.1.3:", "10.244.1.4:",
		"af4:102", "af4:104", "af4:103", "af4:104").Replace(text))
	r.check(p.Sync(t.Context(), before))
	var asking, idle, living []net.Conn
	for _, place := range from {
		for _, to := range service(1) {
			asking, idle = append(asking, r.dial(place, to)), append(idle, r.dial(place, to))
		}
		for _, to := range service(2) {
			living = append(living, r.dial(place, to))
		}
	}
	stop := make(chan struct{})
	ended := r.stream(r.dial(from[len(from)-1], service(2)[0]), stop)
	r.check(r.Bed.Do("dies", unplug))
	for _, c := range asking {
		_, err := c.Write([]byte("?\n"))
		r.check(err)
	}
	r.check(p.Apply(t.Context(), after, model.Diff(before, after)))
	gone := dataplane.Gone{}
	for _, b := range []string{"10.244.1.2:80", "10.244.1.3:80", "[fd00::af4:102]:80", "[fd00::af4:103]:80"} {
		gone[netip.MustParseAddrPort(b)] = time.Now().Add(time.Hour)
	}
	begun, found := time.Now(), 0
	for _, c := range asking {
		var reset error
		eventually.Taking(10*time.Second).True(t, "a connection to a dead backend is reset", func() bool {
			n, err := p.ResetOrphans(t.Context(), gone)
			r.check(err)
			found += n
			reset = silent(c)
			return reset != nil
		})
		t.Logf("%s: %v after %v", c.LocalAddr(), reset, time.Since(begun))
	}
	more := func() bool {
		n, err := p.ResetOrphans(t.Context(), gone)
		r.check(err)
		found += n
		return found >= len(asking)
	}
	for range 30 { // in which data of the stream is on its way
		more()
	}
	eventually.True(t, "all are counted", more)
	if found != len(asking) {
		t.Errorf("%d connections were reset, not %d", found, len(asking))
	}
	close(stop)
	if err := <-ended; err != nil {
		t.Errorf("a stream to a backend that lives: %v", err)
	}
	for _, c := range idle {
		if err := silent(c); err != nil {
			t.Errorf("an idle connection from %s to a dead backend: %v", c.LocalAddr(), err)
		}
	}
	for _, c := range living {
		if _, err := c.Write([]byte("?\n")); err != nil {
			t.Errorf("an idle connection from %s to a backend that lives: %v", c.LocalAddr(), err)
		}
		r.line(c)
	}
}

// silent is the error of a connection on which nothing can be read.
func silent(c net.Conn) error {
	_ = c.SetReadDeadline(time.Now().Add(time.Millisecond))
	_, err := c.Read(make([]byte, 1))
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil
	}
	return err
}

// stream has a backend echo what it is sent, without a pause, until it is to stop.
func (r Orphans) stream(c net.Conn, stop chan struct{}) <-chan error {
	ended := make(chan error, 1)
	go func() {
		data := bytes.Repeat([]byte{testbed.Echo}, 1<<16)
		back := make([]byte, len(data))
		_, err := c.Write(data[:1])
		for err == nil {
			select {
			case <-stop:
				ended <- nil
				return
			default:
			}
			_ = c.SetDeadline(time.Now().Add(eventually.Patience()))
			if _, err = c.Write(data); err == nil {
				_, err = io.ReadFull(c, back)
			}
		}
		ended <- err
	}()
	return ended
}

func (r Orphans) dial(from testbed.Place, to netip.AddrPort) net.Conn {
	r.Helper()
	c, err := r.Bed.Dial(r.Context(), from, model.TCP, to)
	r.check(err)
	r.Cleanup(func() { c.Close() })
	r.line(c)
	return c
}

// line reads what a server says.
func (r Orphans) line(c net.Conn) {
	r.Helper()
	_ = c.SetReadDeadline(time.Now().Add(eventually.Patience()))
	if _, err := c.Read(make([]byte, 128)); err != nil {
		r.Errorf("from %s to %s: %v", c.LocalAddr(), c.RemoteAddr(), err)
	}
}

func (r Orphans) parse(text string) *model.State {
	r.Helper()
	s, err := model.ParseState(text)
	r.check(err)
	return s
}

func (r Orphans) check(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}
