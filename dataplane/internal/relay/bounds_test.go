package relay

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

// TestShed_again: where others took the spare file once, there is one again as soon as there are files.
func TestShed_again(t *testing.T) {
	l, err := socket.ListenTCP(netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	f := &files{}
	defer f.close()
	client, err := net.Dial("tcp", l.LocalAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	eventually.Equal(t, "clients that are reset", 1, func() int { return f.shed(l) })
	_ = client.SetReadDeadline(time.Now().Add(eventually.Patience())) // fails only if it is closed
	if _, err := client.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Error(err)
	}
}
