package ebpf

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
)

// noteGone remembers addresses that no client can be hidden behind any more: programs had them, and the node has lost
// them.
func (d *devices) noteGone(had, has nodeAddrs) error {
	candidates := map[netip.Addr]bool{}
	for _, a := range had {
		candidates[a] = true
	}
	for _, a := range has {
		delete(candidates, a)
	}
	if len(candidates) == 0 {
		return nil
	}
	addrs, err := d.addrs(netlink.FAMILY_ALL)
	if err != nil {
		return fmt.Errorf("list addresses: %w", err)
	}
	for _, have := range addrs {
		if a, ok := netip.AddrFromSlice(have.IP); ok {
			delete(candidates, a.Unmap())
		}
	}
	for a := range candidates {
		d.gone = append(d.gone, a)
	}
	return nil
}

// dropGone has addresses dropped that the node has lost. Where that fails, it is tried again the next time.
func (d *devices) dropGone(drop func([]netip.Addr) error) error {
	gone := d.takeGone()
	err := drop(gone)
	if err != nil {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.gone = append(d.gone, gone...)
	}
	return err
}

// takeGone are the addresses that the node has lost since it was called, and has not got again.
func (d *devices) takeGone() (gone []netip.Addr) {
	d.mu.Lock()
	defer d.mu.Unlock()
	gone, d.gone = d.gone, nil
	if d.programs == nil {
		return gone
	}
	has := slices.Collect(maps.Values(d.programs.node))
	return slices.DeleteFunc(gone, func(a netip.Addr) bool { return slices.Contains(has, a) })
}

// dropHidden removes the flows whose clients are hidden behind addresses that the node has lost: no answer would come.
// Clients of UDP are then hidden behind another one, and connections are reset.
func (s *sweep) dropHidden(gone []netip.Addr) error {
	if len(gone) == 0 {
		return nil
	}
	return each(s.maps[packetsMapTranslations], func(key packetsTuple, t packetsTranslation) error {
		hidden := key.Hook == packetsHookEGRESS && t.State&packetsStateBACK == 0
		if !hidden || !slices.Contains(gone, fromPackets(t.Src).Addr()) {
			return nil
		}
		return s.dropFlow(key)
	})
}

// dropFlow removes the flow that a translation at egress follows from.
func (s *sweep) dropFlow(forth packetsTuple) error {
	key, flow, ok, err := s.flowOf(forth.Protocol, forth.Dst, forth.Src)
	if ok && err == nil {
		_, err = s.forget(key, &flow)
	}
	return err
}
