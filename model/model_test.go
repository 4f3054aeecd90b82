package model

import (
	"encoding/json"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/sample"
)

const example = `backend default/web:http cluster 10.244.1.2:8080 local
backend default/web:http cluster 10.244.2.2:8080 weight 3
backend default/web:http cluster 10.244.2.3:8080 weight 0
backend default/web:http cluster6 [fd00::2]:8080
backend default/web:http local 10.244.1.2:8080 local
frontend 10.96.0.10:80/tcp any forward default/web:http cluster snat offcluster
frontend 10.96.0.10:81/udp any reject default/web:admin
frontend 192.0.2.1:30080/tcp any forward default/web:http local snat never
frontend 192.0.2.1:30080/tcp internal forward default/web:http cluster snat offcluster
frontend 192.0.2.1:30081/sctp any drop default/web:admin
frontend 203.0.113.1:80/tcp any forward default/web:http cluster snat always allow 10.0.0.0/8,192.0.2.0/24
frontend 203.0.113.1:81/tcp any drop default/web:admin allow none
frontend [fd00::10]:80/tcp any forward default/web:http cluster6 snat never
guard 10.96.0.0/16 drop
guard 10.96.0.10/32 reject
health 192.0.2.1:32000 default/web local 2
pods 10.244.0.0/16
pods interface cali*
pods interface cbr0
pool default/web:http cluster affinity 3h0m0s scheduler mh
pool default/web:http cluster6
pool default/web:http local scheduler wlc
`

func TestParseState_roundTrip(t *testing.T) {
	s, err := ParseState(example)
	if err != nil {
		t.Fatal(err)
	}
	if s.String() != example {
		t.Errorf("printed again it is\n%s", s)
	}
	// Any subset of the lines that is a valid State is read as it was written. (A backend implies its
	// pool's line, so these stay.)
	r := rand.New(rand.NewPCG(sample.Seed(t), 0))
	lines := strings.SplitAfter(example, "\n")
	for range 300 {
		var text string
		for _, line := range lines {
			if r.IntN(10) > 0 || strings.HasPrefix(line, "pool ") {
				text += line
			}
		}
		if s, err := ParseState(text); err == nil && s.String() != text {
			t.Fatalf("%q\nis printed as\n%q", text, s)
		}
	}
}

func TestParseState_errors(t *testing.T) {
	for text, want := range map[string]string{
		"nonsense":                                                  `line 1: "nonsense": "nonsense" is not a kind of row`,
		"\n# comment\nguard 10.0.0.0/33 drop":                       "line 3",
		"guard 10.0.0.0/8":                                          "the line is too short",
		"guard 10.0.0.0/8 drop now":                                 `"now" is too much`,
		"guard 10.0.0.0/8 pass":                                     "guard of verdict pass",
		"guard 10.0.0.1/8 drop":                                     "10.0.0.1/8",
		"frontend 10.0.0.1/tcp any drop x":                          `"frontend 10.0.0.1/tcp any drop x"`,
		"frontend 10.0.0.1:80/icmp any drop x":                      `"icmp" is not a protocol`,
		"frontend 10.0.0.1:0/tcp any drop x":                        "not an address and port",
		"frontend 10.0.0.1:80/tcp some drop x":                      `"some" is none of any, internal`,
		"frontend 10.0.0.1:80/tcp any drop x allow 10/":             "line 1",
		"frontend 10.0.0.1:80/tcp any forward x cluster snat never": "no pool x cluster",
		"backend x cluster 10.0.0.1:80":                             "no frontend forwards to it",
		"pool x cluster":                                            "no backend takes connections",
		"frontend [fd00::1]:80/tcp any forward x cluster snat never\nbackend x cluster 10.0.0.1:80": "other address family",
		"frontend 10.0.0.1:80/tcp any forward x cluster snat never\nbackend x cluster [fd00::1]:80": "another address family",
		"frontend 10.0.0.1:80/tcp any forward x cluster snat never\nbackend x cluster 10.0.0.2:80 weight 0": "no backend " +
			"takes connections",
		"backend x cluster 10.0.0.1:80 weight 65536": "out of range",
		"frontend 10.0.0.1:80/tcp any forward x cluster snat never\nbackend x cluster 10.0.0.2:80\n" +
			"pool x cluster scheduler best": `there is no scheduler "best"`,
	} {
		if _, err := ParseState(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v; want an error with %q", text, err, want)
		}
	}
}

func TestLookup(t *testing.T) {
	s, err := ParseState(example)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ source, iface, destination, want string }{
		{"10.244.1.9", "eth0", "10.96.0.10:80", "forward default/web:http cluster"},
		{"192.0.2.1", "", "10.96.0.10:80", "forward default/web:http cluster snat"},
		{"172.16.0.1", "cali7", "10.96.0.10:80", "forward default/web:http cluster"},
		{"172.16.0.1", "cbr0", "10.96.0.10:80", "forward default/web:http cluster"},
		{"172.16.0.1", "cbr01", "10.96.0.10:80", "forward default/web:http cluster snat"},
		{"10.244.1.2", "cali7", "10.96.0.10:80", "forward default/web:http cluster hairpin"},
		{"10.244.2.2", "eth0", "10.96.0.10:80", "forward default/web:http cluster"}, // not on this node
		{"192.0.2.9", "eth0", "192.0.2.1:30080", "forward default/web:http local"},
		{"192.0.2.1", "", "192.0.2.1:30080", "forward default/web:http cluster snat"},
		{"10.244.2.9", "eth0", "192.0.2.1:30080", "forward default/web:http cluster"},
		{"192.0.2.9", "eth0", "203.0.113.1:80", "forward default/web:http cluster snat"},
		{"198.51.100.1", "eth0", "203.0.113.1:80", "drop not allowed"},
		{"192.0.2.9", "eth0", "203.0.113.1:81", "drop not allowed"},
		{"192.0.2.9", "eth0", "10.96.0.10:81", "reject guard 10.96.0.10/32"}, // the frontend is for UDP
		{"192.0.2.9", "eth0", "10.96.0.11:80", "drop guard 10.96.0.0/16"},
		{"192.0.2.9", "eth0", "10.97.0.11:80", "pass"},
		{"fd00::9", "eth0", "[fd00::10]:80", "forward default/web:http cluster6"},
	} {
		d := s.Lookup(Packet{
			Protocol: TCP, Source: netip.MustParseAddr(c.source), Interface: c.iface,
			Destination: netip.MustParseAddrPort(c.destination),
		})
		if got := describe(s, d); got != c.want {
			t.Errorf("%s on %q to %s: %s, want %s", c.source, c.iface, c.destination, got, c.want)
		}
	}
}

func describe(s *State, d Decision) string {
	text := d.Verdict.String()
	if d.Verdict == Forward {
		text += " " + d.Pool.String()
		if d.Masquerade(Backend{}) {
			return text + " snat"
		}
		for _, b := range s.Pools[d.Pool].Backends {
			if d.Masquerade(b) {
				text += " hairpin"
			}
		}
	}
	if d.Guard.IsValid() {
		text += " guard " + d.Guard.String()
	}
	if d.NotAllowed {
		text += " not allowed"
	}
	return text
}

// The Change from one State to another, applied to the first, makes the second; and it says no more
// than that.
func TestDiff(t *testing.T) {
	r := rand.New(rand.NewPCG(sample.Seed(t), 0))
	some := func() *State {
		s, err := ParseState(example)
		if err != nil {
			t.Fatal(err)
		}
		for key := range s.Frontends {
			if r.IntN(3) == 0 {
				delete(s.Frontends, key)
			}
		}
		for id, p := range s.Pools {
			if r.IntN(3) == 0 {
				p.Affinity++
			}
			if r.IntN(3) == 0 {
				p.Scheduler = Schedulers()[r.IntN(2)]
			}
			if r.IntN(3) == 0 {
				p.Rebalance = time.Second
			}
			s.Pools[id] = p
		}
		for p := range s.Guards {
			s.Guards[p] = Reject + Verdict(r.IntN(2))
		}
		clear(s.Health)
		s.Pods.Interfaces = s.Pods.Interfaces[:r.IntN(3)]
		return s
	}
	for range 200 {
		from, to := some(), some()
		c := Diff(from, to)
		if c.Empty() != (from.String() == to.String()) {
			t.Fatalf("Empty is %v", c.Empty())
		}
		if from.Apply(c); from.String() != to.String() {
			t.Fatalf("the change leads to\n%s, not to\n%s", from, to)
		}
		if again := Diff(from, to); !again.Empty() {
			t.Fatalf("a second change: %v", again)
		}
	}
}

func TestDisjoint(t *testing.T) {
	var prefixes []netip.Prefix
	for _, p := range strings.Fields("10.1.0.0/16 fd00::/8 10.0.0.0/8 192.0.2.1/32 10.0.0.0/8 192.0.2.0/31 11.0.0.7/8") {
		prefixes = append(prefixes, netip.MustParsePrefix(p))
	}
	if got := joinPrefixes(Disjoint(prefixes)); got != "10.0.0.0/8,11.0.0.0/8,192.0.2.0/31,fd00::/8" {
		t.Error(got)
	}
}

func TestState_MarshalJSON(t *testing.T) {
	s, err := ParseState(example)
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`{"address":"10.96.0.10:80","protocol":"tcp","scope":"any","service":"default/web:http",` +
			`"verdict":"forward","pool":"default/web:http cluster","snat":"offcluster"}`,
		`"allow":["10.0.0.0/8","192.0.2.0/24"]`, `"allow":[]`,
		`{"address":"10.244.2.2:8080","local":false,"weight":3}`,
		`{"name":"default/web:http cluster","affinitySeconds":10800,"scheduler":"mh","backends":`,
		`{"name":"default/web:http cluster6","backends":`,
		`{"prefix":"10.96.0.10/32","verdict":"reject"}`,
		`{"address":"192.0.2.1:32000","service":"default/web","local":2}`,
		`"pods":{"prefixes":["10.244.0.0/16"],"interfaces":["cali*","cbr0"]}`,
	} {
		if !strings.Contains(string(text), want) {
			t.Errorf("no %s in %s", want, text)
		}
	}
}
