package conformance_test

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane/ipvs"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/model"
)

// markRows are a virtual server of an address and one of a mark, whose clients' sources are replaced.
const markRows = `
frontend 10.96.0.20:80/tcp internal forward default/web:http local snat always
frontend 10.96.0.21:80/tcp any forward default/web:http local snat always
backend default/web:http local 10.244.2.13:8080
pods 10.244.0.0/16
guard 10.96.0.0/16 drop
`

// TestIPVS_marks has others set marks, among them such as the plane's own, wherever IPVS sends a packet along. Its
// source is replaced all the same, and others see in LOCAL_OUT the mark that they have set in LOCAL_IN.
func TestIPVS_marks(t *testing.T) {
	t.Parallel()
	if !hasIPVS(t) {
		vm.Replay(t, "IPVS")
		return
	}
	const output = "add chain inet other output { type route hook output priority mangle; }; add rule inet other output "
	const input = "add chain inet other input { type filter hook input priority filter; }; add rule inet other input " +
		"meta l4proto tcp meta mark set meta mark or "
	const seen = "; add chain inet other raw { type filter hook output priority raw; }; add rule inet other raw " +
		"meta l4proto tcp meta mark and 0xfff00000 == "
	for name, test := range map[string]struct {
		rules string
		seen  bool
	}{
		"none":                      {"", false},
		"set before connections":    {strings.Replace(output, "mangle", "raw", 1) + "meta mark set 0x1", false},
		"set":                       {output + "meta mark set 0x1", false},
		"cleared":                   {output + "meta mark set 0", false},
		"upper bits cleared":        {output + "meta mark set meta mark and 0x00ffffff", false},
		"an endpoint's":             {input + "0xfa000000" + seen + "0xfa000000 counter", true},
		"an endpoint's like ours":   {input + "0xfa100000" + seen + "0xfa100000 counter", true},
		"an endpoint's and set":     {input + "0xfa100000; " + output + "meta mark set 0x1", false},
		"like a virtual server's":   {input + "0xfa100001" + seen + "0xfa100000 counter", true},
		"like what is kept in mind": {input + "0xfa300001" + seen + "0xfa300000 counter", true},
		"all bits set":              {output + "meta mark set 0xffffffff", false},
	} {
		for family, v6 := range map[string]bool{"IPv4": false, "IPv6": true} {
			t.Run(name+"/"+family, func(t *testing.T) {
				t.Parallel()
				d := newDrain(t, ipvs.Options{}, v6)
				d.apply(markRows)
				d.nft("add table inet other; " + test.rules)
				for _, to := range []string{"10.96.0.20:80", "10.96.0.21:80"} {
					d.masqueraded(to)
				}
				if test.seen && strings.Contains(d.nft("list chain inet other raw"), "packets 0 ") {
					t.Errorf("others do not see their mark:\n%s", d.nft("list table inet other"))
				}
			})
		}
	}
}

// masqueraded has a pod connect, and wants its address to be replaced.
func (d *drain) masqueraded(to string) {
	d.Helper()
	o, err := d.bed.Probe(d.Context(), testbed.Probe{
		From: "client", To: netip.MustParseAddrPort(d.text(to)), Protocol: model.TCP, Timeout: 15 * time.Second,
	})
	node := netip.MustParseAddrPort(d.text("192.0.2.1:80")).Addr()
	if err != nil || o.Result != testbed.Answered || o.Source != node {
		d.Errorf("%s: %s, %v; want an answer to %s", to, o, err, node)
	}
}

// nft runs commands on the node.
func (d *drain) nft(commands string) string {
	d.Helper()
	out, err := d.bed.Command(d.Context(), testbed.Node, "nft", commands).CombinedOutput()
	if err != nil {
		d.Fatalf("nft %s: %v: %s", commands, err, out)
	}
	return string(out)
}
