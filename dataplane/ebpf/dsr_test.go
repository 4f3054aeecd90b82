package ebpf

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestDirect sends packets through the programs of a node whose backends elsewhere answer clients themselves.
func TestDirect(t *testing.T) {
	playAll(t, "testdata/direct.txtar", func(t *testing.T, table string) packetOptions {
		mtu, err := strconv.ParseUint(table, 10, 32)
		if err != nil {
			t.Fatal(err)
		}
		return packetOptions{Translations: 1024, DirectMTU: uint32(mtu)}
	})
}

// service is what a packet says whom it is for; not valid: nothing.
func (p packet) service() netip.AddrPort {
	for _, word := range p.words {
		if text, ok := strings.CutPrefix(word, "for="); ok {
			return netip.MustParseAddrPort(text)
		}
	}
	return netip.AddrPort{}
}

// option says it, in IPv4 in an option, in IPv6 in a header whose first byte is yet to be written.
func (p packet) option() []byte {
	service := p.service()
	port := binary.BigEndian.AppendUint16(nil, service.Port())
	if p.v6() {
		return slices.Concat([]byte{0, 2, 0x1e, 20}, port, []byte{0, 0}, service.Addr().AsSlice())
	}
	return slices.Concat([]byte{0x9e, 8}, port, service.Addr().AsSlice())
}

// decodeOption reads such an option. It is false for all others.
func (p *packet) decodeOption(b []byte) bool {
	var addr []byte
	switch {
	case len(b) == 8 && b[0] == 0x9e && b[1] == 8:
		addr = b[4:8]
	case len(b) == 24 && b[1] == 2 && b[2] == 0x1e && b[3] == 20:
		b, addr = b[2:], b[8:24]
	default:
		return false
	}
	a, _ := netip.AddrFromSlice(addr)
	p.words = append(p.words, "for="+netip.AddrPortFrom(a, binary.BigEndian.Uint16(b[2:])).String())
	return true
}

// A flow that is answered directly goes with what follows from it, on both nodes. That which the client goes on with has
// been answered, though no answer has passed.
func TestDirectSweep(t *testing.T) {
	t.Parallel()
	r, s := swept(t, packetOptions{Translations: 1024, DirectMTU: 1500}, packetsPhaseBEGINNING)
	r.sent(
		"lan tcp 192.0.2.9:4000 > 192.0.2.1:30080 S", "lan tcp 192.0.2.9:4000 > 192.0.2.1:30080 A",
		"lan tcp 192.0.2.8:4000 > 192.0.2.1:30080 S",
		"lan tcp 192.0.2.7:4000 > 10.244.1.11:8080 S for=192.0.2.2:30080",
	)
	const unanswered = "out 10.244.1.11:8080 > 192.0.2.7:4000"
	if before := r.flows(); !strings.Contains(before, unanswered) {
		t.Errorf("%s is not among these:\n%s", unanswered, before)
	}
	waitTick(t)
	if gone := r.pass(s); gone != 2 {
		t.Errorf("%d flows are gone; want 2", gone)
	}
	const want = "in 192.0.2.9:4000 > 192.0.2.1:30080\n" +
		"out 10.244.1.11:8080 > 192.0.2.9:4000\nout 192.0.2.9:4000 > 10.244.1.11:8080"
	if got := r.flows(); got != want {
		t.Errorf("what is left:\n%s\nwant:\n%s", got, want)
	}
	age(t, r)
	r.pass(s)
	if got := r.flows(); got != want {
		t.Errorf("what is left when it is old enough to be an orphan:\n%s\nwant:\n%s", got, want)
	}
}
