package ask_test

import (
	"testing"

	"fairlead.dev/fairlead/lab/allocs"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/plugin/ask"
	"fairlead.dev/fairlead/service"
)

// FuzzPacket reads arbitrary arguments of explain: memory is bounded. Accepted arguments are a packet that can be
// explained.
func FuzzPacket(f *testing.F) {
	f.Add("10.244.1.7", "10.96.0.10:53/udp")
	f.Add("node", "[fd00::10]:80")
	f.Add("fe80::1%eth0", "[::ffff:10.96.0.10]:80/SCTP")
	table, err := service.NewTable(service.Options{NodeName: "node"})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, source, destination string) {
		var p model.Packet
		var err error
		allocs.Bound(t, len(source)+len(destination), func() { p, err = ask.ParsePacket("eth0", source, destination) })
		if err != nil {
			return
		}
		if !p.Destination.IsValid() || p.Protocol == 0 || p.Source.IsValid() != (source != "node") {
			t.Errorf("%q %q are the packet %+v", source, destination, p)
		}
		if x := table.Explain(p); x.Verdict != "pass" {
			t.Errorf("without Services there is a verdict on %+v: %s", p, x)
		}
	})
}
