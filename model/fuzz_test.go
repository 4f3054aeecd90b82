package model

import (
	"testing"

	"fairlead.dev/fairlead/lab/allocs"
)

// FuzzParseState reads arbitrary text. Accepted text keeps the promises of a State, and is written as it is read again.
func FuzzParseState(f *testing.F) {
	f.Add(`
backend default/web:http cluster 10.244.1.2:8080 local
backend default/web:http cluster 10.244.2.2:8080 weight 3
frontend 10.96.0.10:80/tcp any forward default/web:http cluster snat offcluster allow 10.0.0.0/8
frontend 10.96.0.10:81/tcp any reject default/web:admin
guard 10.96.0.0/16 drop
health 192.0.2.1:32000 default/web local 2
pods 10.244.0.0/16
pods interface cali*
pool default/web:http cluster affinity 3h0m0s scheduler mh
`)
	f.Add(`
# of an IPv6 pool
frontend [fd00::1]:53/UDP internal forward a/b:c local6 snat never allow none
pool a/b:c local6
`)
	f.Fuzz(func(t *testing.T, text string) {
		var s *State
		var err error
		allocs.Bound(t, len(text), func() { s, err = ParseState(text) })
		if err != nil {
			return
		}
		if err := s.Validate(); err != nil {
			t.Error(err)
		}
		again, err := ParseState(s.String())
		if err != nil {
			t.Fatalf("%v in\n%s", err, s)
		}
		if again.String() != s.String() {
			t.Errorf("read again\n%sis\n%s", s, again)
		}
		if c := Diff(s, again); !c.Empty() {
			t.Errorf("read again the rows differ: %+v", c)
		}
		for key := range s.Frontends {
			p := Packet{Protocol: key.Protocol, Source: key.Addr, Destination: key.AddrPort(), Interface: "eth0"}
			if got, want := again.Lookup(p), s.Lookup(p); got != want {
				t.Errorf("%+v: read again the rows say %+v, not %+v", p, got, want)
			}
		}
	})
}
