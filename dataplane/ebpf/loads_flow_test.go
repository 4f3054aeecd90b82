package ebpf

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"fairlead.dev/fairlead/model"
)

// loadedRows are of a Service with one backend, so that all its flows load that.
const loadedRows = `
pool default/web:http cluster scheduler twos
pool default/web:dns cluster scheduler twos
backend default/web:http cluster 10.244.1.11:8080 local
backend default/web:dns cluster 10.244.1.12:5353 local
frontend 192.0.2.1:30080/tcp any forward default/web:http cluster snat offcluster
frontend 203.0.113.1:80/tcp any forward default/web:http cluster snat never
frontend 203.0.113.1:53/udp any forward default/web:dns cluster snat never
`

// load has loads be counted from now on, by a sweep as well.
func (r packetRun) load(rows string, s *sweep) {
	r.Helper()
	r.tables.loads = newLoads(r.programs.Maps[packetsMapLoads])
	s.loads = r.tables.loads
	r.change(rows)
}

// loadOf is how many connections programs for packets count for a backend.
func (r packetRun) loadOf(service, backend string) int32 {
	r.Helper()
	b, err := parsePacket("tcp " + backend + " > " + backend)
	if err != nil {
		r.Fatal(err)
	}
	var load objectsLoad
	key := loadKey(poolName(model.PoolID{Service: service}), endpoint(b.dst))
	if err := r.tables.loads.Lookup(key, &load); err != nil {
		r.Fatal(err)
	}
	return load.Open[objectsBearerBY_PACKETS]
}

// A flow loads its backend from its first packet on, until both sides have ended it or one has reset it. A client's port
// does not count twice.
func TestLoads_flow(t *testing.T) {
	const opens = "S, <SA, A ack=6"
	cases := map[string]struct {
		packets string
		want    int32
	}{
		"begins":                 {"S", 1},
		"begins again":           {"S, S", 1},
		"is open":                {opens, 1},
		"one side ends":          {opens + ", FA seq=6 ack=6", 1},
		"the backend ends":       {opens + ", <FA seq=6 ack=6", 1},
		"both sides end":         {opens + ", FA seq=6 ack=6, <FA seq=6 ack=7, A seq=7 ack=7", 0},
		"the client resets":      {opens + ", R seq=6", 0},
		"the backend resets":     {opens + ", <RA seq=6 ack=6", 0},
		"is refused":             {"S, <RA ack=6", 0},
		"is forged":              {opens + ", R seq=3000000", 1},
		"again from a port":      {opens + ", FA seq=6 ack=6, <FA seq=6 ack=7, A seq=7 ack=7, S", 1},
		"again after a reset":    {opens + ", R seq=6, S, <SA, A ack=6", 1},
		"again after a refusal":  {"S, <RA ack=6, S", 1},
		"again while it is open": {opens + ", S, <SA, A ack=6", 1},
	}
	for _, service := range []string{"192.0.2.1:30080", "203.0.113.1:80"} {
		t.Run(service, func(t *testing.T) {
			t.Parallel()
			r, s := swept(t, packetOptions{Translations: 1024})
			r.load(loadedRows, s)
			port, sum := 4000, int32(0)
			for name, c := range cases {
				one := connection{packetRun: r, protocol: "tcp", client: fmt.Sprintf("192.0.2.9:%d", port), service: service}
				port++
				one.speak(c.packets)
				if got := r.loadOf("default/web:http", "10.244.1.11:8080") - sum; got != c.want {
					t.Errorf("%s: the load is %d, not %d", name, got, c.want)
				}
				sum += c.want
			}
			for range 3 {
				r.pass(s)
			}
			if got := r.loadOf("default/web:http", "10.244.1.11:8080"); got != sum {
				t.Errorf("the load is %d when all flows have been counted, not %d", got, sum)
			}
		})
	}
}

// speak sends packets of both sides. Those with < are answers.
func (c *connection) speak(packets string) {
	c.Helper()
	for packet := range strings.SplitSeq(packets, ", ") {
		if words, back := strings.CutPrefix(packet, "<"); back {
			c.answer(words)
		} else {
			c.ask(words)
		}
	}
}

// Flows that end silently load their backend until they are removed: by the sweep, or by others that begin.
func TestLoads_silent(t *testing.T) {
	r, s := swept(t, packetOptions{Translations: 1024}, packetsPhaseBEGINNING, packetsPhaseUDP_ASKING)
	r.load(loadedRows, s)
	loads := func(what string, tcp, udp int32) {
		t.Helper()
		if a, b := r.loadOf("default/web:http", "10.244.1.11:8080"), r.loadOf("default/web:dns", "10.244.1.12:5353"); a != tcp || b != udp {
			t.Errorf("%s: the loads are %d and %d, not %d and %d", what, a, b, tcp, udp)
		}
	}
	for i := range 10 {
		r.sent(fmt.Sprintf("lan tcp 192.0.2.9:%d > 203.0.113.1:80 S", 4000+i),
			fmt.Sprintf("lan udp 192.0.2.9:%d > 203.0.113.1:53", 4000+i))
	}
	loads("begin", 10, 10)
	r.open("192.0.2.9:5000", "203.0.113.1:80")
	waitTick(t)
	r.pass(s)
	loads("over", 1, 0)
	for i := range 5000 { // many more than have room
		r.sent(fmt.Sprintf("lan tcp 192.0.2.%d:%d > 203.0.113.1:80 S", 100+i/1000, 4000+i%1000))
	}
	flows := int32(0)
	for range strings.Lines(r.flows()) {
		flows++
	}
	loads("a flood", flows/2, 0)
}

// A load that is wrong is corrected when two passes have found that. One that was not counted at all is, too.
func TestLoads_passes(t *testing.T) {
	r, s := swept(t, packetOptions{Translations: 1024})
	for i := range 5 {
		r.open(fmt.Sprintf("192.0.2.9:%d", 4000+i), "203.0.113.1:80")
	}
	r.load(loadedRows, s)
	for _, want := range []int32{0, 5, 5} {
		r.pass(s)
		if got := r.loadOf("default/web:http", "10.244.1.11:8080"); got != want {
			t.Errorf("of 5 connections %d count", got)
		}
	}
	var key packetsTuple
	var value packetsTranslation
	m := r.programs.Maps[packetsMapTranslations]
	for all := m.Iterate(); all.Next(&key, &value); all = m.Iterate() {
		if err := m.Delete(key); err != nil {
			t.Fatal(err)
		}
	}
	r.pass(s)
	if got := r.loadOf("default/web:http", "10.244.1.11:8080"); got != 0 {
		t.Errorf("there is no flow, and %d count", got)
	}
}

// Loads of pools that have gone go. Those of others are as they were.
func TestLoads_kept(t *testing.T) {
	r, s := swept(t, packetOptions{Translations: 1024})
	r.load(loadedRows, s)
	r.open("192.0.2.9:4000", "203.0.113.1:80")
	rows := strings.ReplaceAll(loadedRows, "pool default/web:dns cluster scheduler twos\n", "")
	r.rows, _ = model.ParseState(loadedRows)
	r.change(rows)
	if err := r.tables.loads.keep(r.tables); err != nil {
		t.Fatal(err)
	}
	if got := r.loadOf("default/web:http", "10.244.1.11:8080"); got != 1 {
		t.Errorf("the load is %d", got)
	}
	keys := 0
	err := each(r.tables.loads.Map, func(objectsLoadKey, objectsLoad) error {
		keys++
		return nil
	})
	if err != nil || keys != 1 {
		t.Errorf("there are %d loads, %v", keys, err)
	}
}

// Where there is no room for loads, backends are drawn by weight alone.
func TestLoads_full(t *testing.T) {
	r, s := swept(t, packetOptions{Translations: 1024})
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 32, ValueSize: 12, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	r.tables.loads = newLoads(m)
	s.loads = r.tables.loads
	r.change(loadedRows)
	if !r.tables.loads.full {
		t.Error("the table of loads is not said to be full")
	}
	if got := r.open("192.0.2.9:4000", "203.0.113.1:80").backend; got != "10.244.1.11:8080" {
		t.Error(got)
	}
}
