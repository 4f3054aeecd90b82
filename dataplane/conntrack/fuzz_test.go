package conntrack

import (
	"bytes"
	"net/netip"
	"testing"

	"fairlead.dev/fairlead/lab/allocs"
	"fairlead.dev/fairlead/model"
)

// FuzzAnswers reads arbitrary attributes as a tracked flow: no panic, and bounded memory.
func FuzzAnswers(f *testing.F) {
	for _, text := range []string{"10.244.1.2:53", "[fd00::af4:102]:53"} {
		at := netip.MustParseAddrPort(text)
		flow, err := tupleOf(model.UDP, at, at)
		if err != nil {
			f.Fatal(err)
		}
		reply := bytes.Clone(flow)
		reply[2] = 2 // CTA_TUPLE_REPLY in place of CTA_TUPLE_ORIG
		if who, err := answering(reply); err != nil || who.From != at {
			f.Errorf("%s answers, %v; want %s", who.From, err, at)
		}
		f.Add(append(flow, reply...))
	}
	f.Fuzz(func(t *testing.T, flow []byte) {
		allocs.Bound(t, len(flow), func() { _, _ = answering(flow) })
	})
}
