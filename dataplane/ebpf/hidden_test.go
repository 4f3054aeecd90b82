package ebpf

import (
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
)

// Flows behind an address that the node has lost go, also if they could not be read the first time.
func TestHidden_again(t *testing.T) {
	r, s := swept(t, packetOptions{Translations: 1024})
	r.sent("lan tcp 192.0.2.8:4000 > 192.0.2.1:30080 S")
	d := &devices{gone: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}
	table := s.maps[packetsMapTranslations]
	s.maps[packetsMapTranslations] = unreadable(t, table)
	s.turn(d.dropGone)
	if s.failed() == nil {
		t.Error("flows were read from a table that is closed")
	}
	s.maps[packetsMapTranslations] = table
	for range 2 {
		s.turn(d.dropGone)
		if err := s.failed(); err != nil {
			t.Error(err)
		}
	}
	if got := r.flows(); got != "" {
		t.Errorf("there are still\n%s", got)
	}
}

// unreadable is a table of which the kernel hands out nothing.
func unreadable(t *testing.T, like *ebpf.Map) *ebpf.Map {
	t.Helper()
	m, err := like.Clone()
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	return m
}
