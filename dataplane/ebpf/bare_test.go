package ebpf

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// TestBare has a client behind a device without a link layer, which is added while the plane works. The test writes
// packets to the device and reads them from it as they are.
func TestBare(t *testing.T) {
	t.Parallel()
	bed := outsideBedOf(t, testbed.Spec{Cgroup: true})
	dir := testbed.NeedBPFFS(t)
	var p dataplane.Dataplane
	err := bed.Do(testbed.Node, func() (err error) {
		p, err = New(Options{Cgroup: bed.Cgroup(), Pins: filepath.Join(dir, "fairlead"), Serve: TC})(dataplane.Config{})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(p.Remove(context.Background()), p.Close()); err != nil {
			t.Error(err)
		}
	})
	s, err := model.ParseState(outsideRows)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Sync(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	tun := newTun(t, bed)
	for { // until the device has been heard of
		report, err := p.Audit(t.Context(), s, dataplane.Quick)
		if err != nil {
			t.Fatal(err)
		}
		if len(report.Drifts) == 0 {
			break
		}
	}
	for asked, answered := range map[string]string{
		"tcp 10.9.0.2:4000 > 203.0.113.1:80 S empty":  "tcp 203.0.113.1:80 > 10.9.0.2:4000",
		"udp 10.9.0.2:4001 > 192.0.2.1:30053":         "udp 192.0.2.1:30053 > 10.9.0.2:4001",
		"tcp 10.9.0.2:4002 > 192.0.2.1:30081 S empty": "tcp 192.0.2.1:30081 > 10.9.0.2:4002", // a reset
	} {
		p, err := parsePacket(asked)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tun.Write(p.ip()); err != nil {
			t.Fatal(err)
		}
		if got := readPacket(t, tun, p.src); !strings.HasPrefix(got, answered) {
			t.Errorf("%s: %s; want %s …", asked, got, answered)
		}
	}
}

// newTun makes a device of the node, behind which is 10.9.0.2.
func newTun(t *testing.T, bed *testbed.Bed) (tun *os.File) {
	t.Helper()
	lack.Need(t, lack.Tun)
	err := bed.Do(testbed.Node, func() error {
		l := &netlink.Tuntap{
			LinkAttrs: netlink.LinkAttrs{Name: "tun0"}, Mode: netlink.TUNTAP_MODE_TUN, Queues: 1,
			Flags: netlink.TUNTAP_NO_PI,
		}
		if err := netlink.LinkAdd(l); err != nil {
			return err
		}
		defer l.Fds[0].Close()
		fd, err := unix.Dup(int(l.Fds[0].Fd()))
		if err == nil {
			err = unix.SetNonblock(fd, true) // a file with deadlines
		}
		if err != nil {
			return err
		}
		tun = os.NewFile(uintptr(fd), "tun0")
		addr, err := netlink.ParseAddr("10.9.0.1/24")
		if err != nil {
			return err
		}
		return errors.Join(netlink.AddrAdd(l, addr), netlink.LinkSetUp(l))
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tun.Close() })
	return tun
}

// readPacket is the next packet to a client.
func readPacket(t *testing.T, tun *os.File, client netip.AddrPort) string {
	t.Helper()
	b := make([]byte, 2048)
	for {
		if err := tun.SetReadDeadline(time.Now().Add(eventually.Patience())); err != nil {
			t.Fatal(err)
		}
		n, err := tun.Read(b)
		var timeout net.Error
		if errors.As(err, &timeout) && timeout.Timeout() {
			return "nothing"
		}
		if err != nil {
			t.Fatal(err)
		}
		if p, err := decodeIP(b[:n], true); err == nil && p.dst == client {
			return p.String()
		}
	}
}
