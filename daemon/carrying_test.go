package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"testing"

	"github.com/vishvananda/netlink"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/testbed/nstest"
	"fairlead.dev/fairlead/model"
)

// A plane that was taken back, and is closed before it has had rows again, goes on with its connections.
func TestCarrying_takenBack(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		kept := &carrying{}
		if err := errors.Join(closedAgain(kept), kept.close()); err != nil {
			t.Error(err)
		}
	})
}

// routed has a node with an address that knows a way to all others.
func routed() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	own, err := netlink.ParseAddr("192.0.2.1/32")
	if err != nil {
		return err
	}
	all := &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}
	return errors.Join(netlink.LinkSetUp(lo), netlink.AddrAdd(lo, own),
		netlink.RouteAdd(&netlink.Route{LinkIndex: lo.Attrs().Index, Dst: all, Src: own.IP}))
}

func closedAgain(kept *carrying) error {
	backend, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer backend.Close()
	s, err := model.ParseState("backend default/web cluster " + backend.Addr().String() + " local\n" +
		"frontend 10.96.0.10:80/tcp any forward default/web cluster snat offcluster\npool default/web cluster\n")
	if err == nil {
		err = routed()
	}
	if err != nil {
		return err
	}
	open := func() (opened, error) {
		return planeSettings{name: userspacePlane, mark: 1 << 14}.inherit(dataplane.Config{Log: slog.New(slog.DiscardHandler)},
			legacy{kept: kept, opening: opening{exact: true}, cleared: func(opened) {}})
	}
	o, err := open()
	if err != nil {
		return err
	}
	if err := o.Sync(context.Background(), s); err != nil {
		return err
	}
	client, err := net.Dial("tcp", "10.96.0.10:80")
	if err != nil {
		return err
	}
	defer client.Close()
	server, err := backend.Accept()
	if err != nil {
		return err
	}
	defer server.Close()
	for range 2 {
		if err := o.Close(); err != nil {
			return err
		}
		if o, err = open(); err != nil {
			return err
		}
	}
	if err := o.Close(); err != nil {
		return err
	}
	if told := fmt.Sprint(kept.tell()); told != "[{userspace 1}]" {
		return fmt.Errorf("what is carried: %s", told)
	}
	if _, err := client.Write([]byte("x")); err != nil {
		return err
	}
	_, err = server.Read(make([]byte, 1))
	return err
}
