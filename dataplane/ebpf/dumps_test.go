package ebpf

import (
	"fmt"
	"testing"

	"github.com/vishvananda/netlink"

	"fairlead.dev/fairlead/lab/testbed/nstest"
)

// An element that is there all the time is in every listing, whatever comes and goes meanwhile.
func TestListings(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		const stay, listings = 1000, 100
		add := func(l netlink.Link) {
			if err := netlink.LinkAdd(l); err != nil {
				t.Error(err)
			}
		}
		at := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "stays"}}
		add(at)
		for i := range stay {
			if err := addAddr(at, fmt.Sprintf("10.1.%d.%d/32", i/250, i%250)); err != nil {
				t.Error(err)
				return
			}
		}
		d, err := newDevices(t.TempDir(), nil, func(string) error { return nil })
		if err != nil {
			t.Error(err)
			return
		}
		defer d.close()
		handle, err := netlink.NewHandle()
		if err != nil {
			t.Error(err)
			return
		}
		defer handle.Close()
		done := make(chan struct{})
		changed := make(chan error, 1)
		go func() { changed <- comeAndGo(handle, at, done) }()
		for i := range listings {
			if all, err := d.ownAddrs(); err != nil || len(all) < stay-1 { // one has left
				t.Errorf("listing %d has %d of %d addresses: %v", i, len(all), stay, err)
				break
			}
		}
		close(done)
		if err := <-changed; err != nil {
			t.Error(err)
		}
	})
}

func addAddr(l netlink.Link, text string) error {
	a, err := netlink.ParseAddr(text)
	if err != nil {
		return err
	}
	return netlink.AddrAdd(l, a)
}

// comeAndGo has the first address of a device leave it and come again at the end of its list, which moves all others.
func comeAndGo(h *netlink.Handle, l netlink.Link, done <-chan struct{}) error {
	addrs, err := h.AddrList(l, netlink.FAMILY_V4)
	if err != nil {
		return err
	}
	for i := 0; ; i = (i + 1) % len(addrs) {
		select {
		case <-done:
			return nil
		default:
		}
		if err := h.AddrDel(l, &addrs[i]); err != nil {
			return err
		}
		if err := h.AddrAdd(l, &addrs[i]); err != nil {
			return err
		}
	}
}
