package service_test

import (
	"net/netip"
	"strings"
	"testing"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// A zone keeps the share of the backends that answer. It gets the rest back as slowly as these do.
func TestTable_spill(t *testing.T) {
	for mode, want := range map[service.HealthMode]string{
		service.HealthEject: "00.0 1 1 0 0|01.4 0 2 1 1|" +
			"06.6 16 256 120 120|06.8 32 256 112 112|07.8 32 128 48 48|08.8 32 64 16 16|09.8 1 1 0 0",
		service.HealthObserve: "00.0 1 1 0 0",
	} {
		h := newHealth(t, mode, "fairlead.dev/slow-start: 3s", true)
		h.play(t, 12, "1-5 10.0.0.1 unanswered 1\n5-12 10.0.0.1 answered 1\n0-12 10.0.0.1 answered 2\n0-12 10.0.0.2 answered 3")
		if got := strings.Join(h.changes, "|"); got != want {
			t.Errorf("%s: shares of the backends:\n%s\nwant\n%s", mode, got, want)
		}
	}
}

// The reason for an endpoint in use says how much spills from a zone.
func TestTable_spillText(t *testing.T) {
	h := newHealth(t, service.HealthEject, "", true)
	h.play(t, 3, "1-3 10.0.0.1 unanswered 1\n0-3 10.0.0.1 answered 2\n0-3 10.0.0.2 answered 3")
	const want = "1 of 2 endpoints of zone zone-1 have their full share: 50% of new connections go to other zones"
	s, _ := h.table.Summarise(service.Name{Namespace: "shop", Name: "web"}, true)
	if got := s.Ports[0]; got.Spill != want || got.Ready != 3 {
		t.Errorf("%+v", got)
	}
	x := h.table.Explain(model.Packet{
		Source: addr("10.244.9.9"), Interface: "pod", Destination: netip.MustParseAddrPort("10.96.0.1:80"), Protocol: model.TCP,
	})
	if !strings.Contains(x.String(), want) || x.Backends[0].Probability != .5 {
		t.Error(x)
	}
}
