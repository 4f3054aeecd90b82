package ebpf

import (
	"slices"
	"testing"

	"github.com/cilium/ebpf"
)

// A program that others have been interrupted for works on its packet in a place of its own, and gives that back. If
// too many are, packets are lost.
func TestWork_preempted(t *testing.T) {
	const asks = "tcp 192.0.2.9:4000 > 192.0.2.1:30080 S"
	r := newPacketRunWith(t, sweptRows, packetOptions{Translations: 1024, Preempted: true})
	works := r.programs.Maps[packetsMapWorks]
	in, err := parsePacket(asks)
	if err != nil {
		t.Fatal(err)
	}
	served := ""
	for interrupted := range works.MaxEntries() {
		for hook, packet := range map[string]packet{"lan": in, "out": in} {
			got := r.through(hook, packet)
			if hook == "lan" && served == "" {
				served = got
			}
			if hook == "lan" && (got != served || got == "dropped") {
				t.Errorf("%d interrupted: %s; with none %s", interrupted, got, served)
			}
			if hook == "out" && got != "the same" {
				t.Errorf("%d interrupted, leaving: %s", interrupted, got)
			}
		}
		for i := range works.MaxEntries() {
			if i < interrupted {
				expectUntouched(t, works, i)
			} else if got := mostTaken(t, works, i); got != 0 {
				t.Errorf("%d interrupted: place %d is taken %d times", interrupted, i, got)
			}
		}
		interrupt(t, works, interrupted)
	}
	for _, hook := range []string{"lan", "out"} {
		if got := r.through(hook, in); got != "dropped" {
			t.Errorf("%s: %s", hook, got)
		}
	}
}

// interrupt has a program be in a place, on every processor.
func interrupt(t *testing.T, works *ebpf.Map, place uint32) {
	t.Helper()
	if err := works.Put(place, slices.Repeat([]packetsWork{{Taken: 1}}, ebpf.MustPossibleCPU())); err != nil {
		t.Fatal(err)
	}
}

// expectUntouched expects a place as interrupt has left it.
func expectUntouched(t *testing.T, works *ebpf.Map, place uint32) {
	t.Helper()
	var all []packetsWork
	if err := works.Lookup(place, &all); err != nil {
		t.Fatal(err)
	}
	for _, w := range all {
		if w != (packetsWork{Taken: 1}) {
			t.Errorf("somebody has worked in place %d, which another one is in: %+v", place, w)
		}
	}
}

// mostTaken is how many are in a place, on the processor where they are most.
func mostTaken(t *testing.T, works *ebpf.Map, place uint32) (most uint32) {
	t.Helper()
	var all []packetsWork
	if err := works.Lookup(place, &all); err != nil {
		t.Fatal(err)
	}
	for _, w := range all {
		most = max(most, w.Taken)
	}
	return most
}
