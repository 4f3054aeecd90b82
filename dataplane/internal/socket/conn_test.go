package socket_test

import (
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/socket"
	"fairlead.dev/fairlead/lab/eventually"
)

// TestReset_shared has a second descriptor of the socket open, as a child has between its fork and its program.
func TestReset_shared(t *testing.T) {
	for name, end := range map[string]func(fd int) (socket.End, error){
		"accepted": func(fd int) (socket.End, error) { return socket.Accepted{FD: fd}, nil },
		"open":     func(fd int) (socket.End, error) { return socket.Open(fd) },
	} {
		t.Run(name, func(t *testing.T) {
			client, fd := accept(t)
			shared, err := unix.Dup(fd)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(shared)
			side, err := end(fd)
			if err != nil {
				t.Fatal(err)
			}
			side.Reset()
			if _, err := client.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
				t.Error(err)
			}
		})
	}
}

// accept returns the two sides of a connection.
func accept(t *testing.T) (client net.Conn, fd int) {
	t.Helper()
	listener, err := socket.ListenTCP(netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	if client, err = net.Dial("tcp", listener.LocalAddr().String()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	err = errors.Join(client.SetDeadline(time.Now().Add(eventually.Patience())),
		listener.Accept(func(accepted int, _ netip.AddrPort) { fd = accepted }))
	if err != nil {
		t.Fatal(err)
	}
	return client, fd
}
