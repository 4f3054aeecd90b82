package relay

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/socket"
	"fairlead.dev/fairlead/internal/namespace"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/model"
)

// answerAt has a backend answer datagrams with a name.
func answerAt(t *testing.T, at, name string) netip.AddrPort {
	t.Helper()
	conn := listenAt(t, at)
	go func() {
		for {
			_, client, err := conn.ReadFromUDPAddrPort(make([]byte, 100))
			if err != nil {
				return
			}
			_, _ = conn.WriteToUDPAddrPort([]byte(name), client) // a client that misses it asks again
		}
	}()
	return conn.LocalAddr().(*net.UDPAddr).AddrPort()
}

func listenAt(t *testing.T, at string) *net.UDPConn {
	t.Helper()
	conn, err := socket.ListenUDP(netip.MustParseAddrPort(at))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// TestExpel_meanwhile: a backend leaves while a flow is being opened to it. Its client gets another one.
func TestExpel_meanwhile(t *testing.T) {
	leaves, stays := answerAt(t, "127.0.1.2:0", "leaves"), answerAt(t, "127.0.1.3:0", "stays")
	refuses := netip.AddrPortFrom(netip.MustParseAddr("127.0.1.1"), leaves.Port())
	for name, c := range map[string]struct {
		call          int // in which it leaves
		before, after []netip.AddrPort
	}{
		"begins": {1, []netip.AddrPort{leaves}, []netip.AddrPort{stays}},
		"moves":  {2, []netip.AddrPort{refuses, leaves}, []netip.AddrPort{refuses, stays}},
	} {
		t.Run(name, func(t *testing.T) {
			conn := listenAt(t, "127.0.0.1:0")
			at := conn.LocalAddr().(*net.UDPAddr).AddrPort()
			before, after, calls := rowsOf(t, at, c.before...), rowsOf(t, at, c.after...), 0
			serve(t, conn, before, func(p *Proxy, call Call, b model.Backend) (*socket.Conn, error) {
				backend, err := p.Connect(call, b)
				if calls++; calls == c.call {
					change := model.Diff(before, after)
					p.Rows.Change(change)
					p.Expel(&change)
				}
				return backend, err
			})
			if got := ask(t, at); got != "stays" {
				t.Errorf("%q answers", got)
			}
		})
	}
}

// rowsOf has a destination with backends.
func rowsOf(t *testing.T, at netip.AddrPort, backends ...netip.AddrPort) *model.State {
	t.Helper()
	text := fmt.Sprintf("frontend %s/udp any forward default/dns cluster snat always\npool default/dns cluster\n", at)
	for _, b := range backends {
		text += fmt.Sprintf("backend default/dns cluster %s\n", b)
	}
	s, err := model.ParseState(text)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// serve serves the destination at which a socket is, by sockets that connect makes.
func serve(t *testing.T, conn *net.UDPConn, rows *model.State,
	connect func(*Proxy, Call, model.Backend) (*socket.Conn, error),
) (p *Proxy) {
	p = New(Options{
		DialTimeout: time.Second, Dials: 4, FlowTimeout: time.Minute, StreamTimeout: time.Minute,
		MaxConnections: 1, MaxFlows: 1000, Extra: 1,
		Connect: func(call Call, b model.Backend, _ ...socket.Setup) (*Socket, error) {
			backend, err := connect(p, call, b)
			return &Socket{Conn: backend}, err
		},
	}, namespace.Namespace{})
	p.Rows.Replace(rows)
	at := conn.LocalAddr().(*net.UDPAddr).AddrPort()
	answers := &Answers{UDPConn: conn, At: at}
	p.Receive(conn, func(client netip.AddrPort, _ []byte) (Packet, bool) {
		return Packet{Client: client, Destination: at, From: answers}, true
	})
	t.Cleanup(p.Close)
	t.Cleanup(func() { conn.Close() })
	return p
}

// TestSend_noRoom: what one client sends finds no room on the way to its backend. Other clients do not wait for that.
func TestSend_noRoom(t *testing.T) {
	conn := listenAt(t, "127.0.0.1:0")
	at := conn.LocalAddr().(*net.UDPAddr).AddrPort()
	full, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(full[1]) }) // no process reads there
	other := net.Dialer{LocalAddr: &net.UDPAddr{IP: net.IPv4(127, 0, 0, 9)}}
	rows := rowsOf(t, at, answerAt(t, "127.0.1.2:0", "answers"))
	serve(t, conn, rows, func(p *Proxy, call Call, b model.Backend) (*socket.Conn, error) {
		if call.Client().Addr() == netip.AddrFrom4([4]byte{127, 0, 0, 9}) {
			return socket.Open(full[0])
		}
		return p.Connect(call, b)
	})
	client, err := other.DialContext(t.Context(), "udp", at.String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	for range 1000 {
		if _, err := client.Write([]byte("?")); err != nil {
			t.Fatal(err)
		}
	}
	if got := ask(t, at); got != "answers" {
		t.Errorf("%q answers", got)
	}
}

// TestSend_large: flows without an answer keep little memory, however large the datagrams are.
func TestSend_large(t *testing.T) {
	const flows, size = 300, 60_000
	conn := listenAt(t, "127.0.0.1:0")
	at := conn.LocalAddr().(*net.UDPAddr).AddrPort()
	silent := listenAt(t, "127.0.1.2:0").LocalAddr().(*net.UDPAddr).AddrPort()
	p := serve(t, conn, rowsOf(t, at, silent), func(p *Proxy, call Call, b model.Backend) (*socket.Conn, error) {
		return p.Connect(call, b)
	})
	before := used()
	for n := range flows {
		client, err := net.Dial("udp", at.String())
		if err == nil {
			_, err = client.Write(make([]byte, size))
		}
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		eventually.Equal(t, "flows", n+1, p.Open)
	}
	if more := used() - before; more > flows*size/2 {
		t.Errorf("%d flows keep %d bytes", flows, more)
	}
}

// used is how much memory is in use.
func used() int {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}

// ask asks until there is an answer.
func ask(t *testing.T, at netip.AddrPort) string {
	t.Helper()
	client, err := net.Dial("udp", at.String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	text := make([]byte, 100)
	n := 0
	eventually.Nil(t, "an answer", func() (err error) {
		_, err = client.Write([]byte("?"))
		if err = errors.Join(err, client.SetReadDeadline(time.Now().Add(100*time.Millisecond))); err == nil {
			n, err = client.Read(text)
		}
		return err
	})
	return string(text[:n])
}
