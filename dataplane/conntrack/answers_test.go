package conntrack_test

import (
	"net/netip"
	"testing"

	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// The table names the backend that answers a translated flow, and the destination of any other flow.
func TestTable_answers(t *testing.T) {
	s := newStage(t)
	s.must(pods, "pods fd00::af4:0/112", dns, pool("default/dns cluster", 53, "a"),
		"frontend [fd00::a60:a]:53/udp any forward default/dns cluster6 snat offcluster",
		"pool default/dns cluster6", "backend default/dns cluster6 [fd00::af4:102]:53")
	var table *conntrack.Table
	err := s.bed.Do(testbed.Node, func() (err error) {
		table, err = conntrack.OpenTable()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer table.Close()
	for to, want := range map[string]string{
		"10.96.0.10:53": "10.244.1.2:53", "[fd00::a60:a]:53": "[fd00::af4:102]:53", "10.244.1.2:53": "10.244.1.2:53",
	} {
		f := s.flows("client", to)[0]
		from, asked := netip.MustParseAddrPort(f.LocalAddr().String()), netip.MustParseAddrPort(to)
		who, ok, err := table.Answers(model.UDP, from, asked)
		if who.From.String() != want || !ok || err != nil {
			t.Errorf("%s: %s answers, %t, %v; want %s", to, who.From, ok, err, want)
		}
		if who, ok, err := table.Answers(model.TCP, from, asked); ok || err != nil {
			t.Errorf("%s by TCP, which nobody has: %s answers, %v", to, who.From, err)
		}
	}
}
