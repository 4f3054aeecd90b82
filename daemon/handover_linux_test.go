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
	"fairlead.dev/fairlead/dataplane/handover"
	"fairlead.dev/fairlead/dataplane/memory"
	"fairlead.dev/fairlead/lab/testbed/nstest"
	"fairlead.dev/fairlead/model"
)

// startPlane starts a node's data plane with those settings.
func startPlane(log *slog.Logger, s planeSettings, all []dataplane.Driver, cleared func(*handover.Plane)) (*handover.Handover, error) {
	h := handover.New(handover.Options{Drivers: all, Cleared: cleared, DrainTime: drainTime, Log: log})
	p, err := h.Reopen(dataplane.Config{Log: log}, s, s.open)
	if err == nil {
		h.Start(p)
	}
	return h, err
}

// A plane that was taken back, and is closed before it has had rows again, goes on with its connections.
func TestHandover_takenBack(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		h, err := startPlane(slog.New(slog.DiscardHandler), planeSettings{name: userspacePlane, mark: 1 << 14}, drivers(), nil)
		if err == nil {
			err = errors.Join(closedAgain(h), h.Close())
		}
		if err != nil {
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

func closedAgain(h *handover.Handover) error {
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
	if err := h.Sync(context.Background(), s); err != nil {
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
	p := h.InForce()
	next, err := (&memory.Kernel{}).New(dataplane.Config{})
	if err != nil {
		return err
	}
	h.Start(&handover.Plane{Dataplane: next, Name: memory.Name})
	for range 2 {
		if err := h.Discard(p); err != nil {
			return err
		}
		if p, err = h.Reopen(dataplane.Config{}, p.Settings, nil); err != nil {
			return err
		}
	}
	if err := h.Discard(p); err != nil {
		return err
	}
	if kept := fmt.Sprint(h.Kept()); kept != "[{userspace 1}]" {
		return fmt.Errorf("the planes that are kept are %s", kept)
	}
	if _, err := client.Write([]byte("x")); err != nil {
		return err
	}
	_, err = server.Read(make([]byte, 1))
	return err
}
