package ebpf

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"fairlead.dev/fairlead/model"
)

// sharedRows are of two owners; both have ports at which clients are hidden.
const sharedRows = `
backend one/web:http cluster 10.244.1.11:8080 local
backend one/dns:dns cluster 10.244.1.11:5353 local
backend two/web:http cluster 10.244.1.12:8080 local
backend two/dns:dns cluster 10.244.1.12:5353 local
frontend 203.0.113.1:80/tcp any forward one/web:http cluster snat never
frontend 203.0.113.1:53/udp any forward one/dns:dns cluster snat never
frontend 192.0.2.1:30080/tcp any forward one/web:http cluster snat always
frontend 203.0.113.1:81/tcp any forward two/web:http cluster snat never
frontend 203.0.113.1:54/udp any forward two/dns:dns cluster snat never
frontend 192.0.2.1:30081/tcp any forward two/web:http cluster snat always
`

// connection is one that a client has opened.
type connection struct {
	packetRun
	protocol, client, service string
	backend, own              string // whom it reaches, and as whom at the backend
}

// open is a connection of TCP, whose client has gone on after an answer.
func (r packetRun) open(client, service string) connection {
	r.Helper()
	c := connection{packetRun: r, protocol: "tcp", client: client, service: service}
	c.ask("S")
	c.answer("SA")
	c.ask("A ack=6")
	return c
}

// become is what becomes of a packet at a hook.
func (c *connection) become(hook, from, to, words string) (src, dst string) {
	c.Helper()
	p, err := parsePacket(strings.Join([]string{c.protocol, from, ">", to, words}, " "))
	if err != nil {
		c.Fatal(err)
	}
	got := c.through(hook, p)
	if got == "the same" {
		return from, to
	}
	fields := strings.Fields(got)
	if len(fields) < 4 {
		return got, ""
	}
	return fields[1], fields[3]
}

// ask sends a packet of the client's to the backend.
func (c *connection) ask(words string) {
	c.Helper()
	src, dst := c.become("lan", c.client, c.service, words)
	c.own, c.backend = c.become("out", src, dst, words)
}

// answer sends one back. It reports whether it comes from the service.
func (c *connection) answer(words string) bool {
	c.Helper()
	src, dst := c.become("pod", c.backend, c.own, words)
	src, dst = c.become("out", src, dst, words)
	return src == c.service && dst == c.client
}

// lives reports whether packets find their way to the same backend, and back.
func (c *connection) lives() bool {
	c.Helper()
	backend, own := c.backend, c.own
	words := ""
	if c.protocol == "tcp" {
		words = "A ack=6 seq=6"
	}
	c.ask(words)
	lives := c.backend == backend && c.own == own && c.answer(words)
	c.backend, c.own = backend, own
	return lives
}

// lasting is a flow of datagrams that has gone on for some seconds.
func (r packetRun) lasting(t *testing.T, client, service string) connection {
	t.Helper()
	c := connection{packetRun: r, protocol: "udp", client: client, service: service}
	c.ask("")
	c.answer("")
	shift(t, r, -2)
	c.ask("")
	return c
}

// flood has many clients begin something, from addresses that do not answer, and returns how many reach a backend. It
// makes no difference what backends say to them.
func (r packetRun) flood(n int) (reached int) {
	r.Helper()
	for i := range n {
		c := connection{packetRun: r, protocol: "tcp", client: fmt.Sprintf("198.%d.%d.%d:4000", 18+i>>16, i>>8&255, i&255)}
		words := "S"
		switch i % 3 {
		case 0:
			c.service = "203.0.113.1:80"
		case 1:
			c.service = "192.0.2.1:30080"
		case 2:
			c.protocol, c.service, words = "udp", "203.0.113.1:53", ""
		}
		c.ask(words)
		if strings.HasPrefix(c.backend, "10.244.1.11:") {
			reached++
		}
		if i%2 == 0 && words == "S" {
			c.answer("SA")
			c.ask("A ack=4711")
		} else if i%2 == 0 {
			c.answer("")
		}
	}
	return reached
}

// Packets from addresses that do not answer end no flow that lasts, and keep no client from beginning one.
func TestShares_flood(t *testing.T) {
	for name, noted := range map[string]bool{"": false, "noted": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const places = 1 << 12
			r := newPacketRunWith(t, sharedRows, packetOptions{Translations: places})
			s := r.sweep(patience())
			if noted {
				r.pass(s)
			}
			var open []connection
			for i := range 20 {
				open = append(open, r.open(fmt.Sprintf("192.0.2.9:%d", 4000+i), "203.0.113.1:80"),
					r.open(fmt.Sprintf("192.0.2.9:%d", 5000+i), "192.0.2.1:30080"),
					r.lasting(t, fmt.Sprintf("192.0.2.9:%d", 4000+i), "203.0.113.1:53"))
			}
			if n := 2 * places; r.flood(n) != n {
				t.Errorf("of %d that begin not all reach a backend", n)
			}
			if noted {
				r.pass(s)
			}
			for _, c := range open {
				if !c.lives() {
					t.Errorf("%s %s > %s has ended", c.protocol, c.client, c.service)
				}
			}
			if n := len(r.translations()); n > places/2 {
				t.Errorf("the flood has left %d translations", n)
			}
			late := r.open("192.0.2.9:6000", "192.0.2.1:30080")
			r.flood(places)
			if !late.lives() {
				t.Error("a connection that began in the flood has ended")
			}
		})
	}
}

// An owner alone may have most of the table. Whatever it has, others' flows stay, and there is room for more of them.
func TestShares_owners(t *testing.T) {
	const places = 1 << 13
	r := newPacketRunWith(t, sharedRows, packetOptions{Translations: places})
	s := r.sweep(patience())
	var victims []connection
	begin := func() {
		for i := range 20 {
			victims = append(victims, r.open(fmt.Sprintf("192.0.2.9:%d", 4000+len(victims)), "203.0.113.1:81"),
				r.open(fmt.Sprintf("192.0.2.9:%d", 5000+i+len(victims)), "192.0.2.1:30081"))
		}
	}
	begin()
	greedy := ownerOf(model.PoolID{Service: "one/web:http"})
	for i := range places { // twice as many as there is room for
		r.open(fmt.Sprintf("198.18.%d.%d:4000", i>>8, i&255), "203.0.113.1:80")
	}
	begin()
	r.flood(places)
	for _, c := range victims {
		if !c.lives() {
			t.Errorf("%s > %s has ended", c.client, c.service)
		}
	}
	held, room := s.shares.held(greedy), s.shares.room
	if part := 100 * held / room; part < 80 || part > 90 {
		t.Errorf("one owner holds %d of %d places", held, room)
	}
	r.pass(s)
	if got := s.shares.held(greedy); got != held {
		t.Errorf("a pass makes %d of %d places", got, held)
	}
}

// A client that has not been answered yet waits on, whatever begins at another owner's Services meanwhile.
func TestShares_waiting(t *testing.T) {
	// The kernel keeps up to 128 free elements of a table for each processor. They must be few beside all.
	const places = 1 << 13
	r := newPacketRunWith(t, sharedRows, packetOptions{Translations: places})
	const rounds = 8 // one client waits in each: who begins may end what waits of the same owner
	for round := range rounds {
		c := connection{
			packetRun: r, protocol: "tcp", client: fmt.Sprintf("192.0.2.9:%d", 4000+round), service: "203.0.113.1:81",
		}
		c.ask("S")
		for i := range places / rounds {
			r.sent(fmt.Sprintf("lan tcp 198.18.%d.%d:%d > 203.0.113.1:80 S", i>>8, i&255, 4000+round))
		}
		if !c.answer("SA") {
			t.Errorf("%s > %s gets no answer", c.client, c.service)
		}
	}
}

// A pass corrects wrong counts, and takes an owner's places back when its flows are over.
func TestShares_settle(t *testing.T) {
	r := newPacketRunWith(t, sharedRows, packetOptions{Translations: 1 << 12})
	s := r.sweep(&phases{})
	owner := ownerOf(model.PoolID{Service: "one/web:http"})
	for i := range 10 {
		r.open(fmt.Sprintf("192.0.2.9:%d", 4000+i), "203.0.113.1:80")
	}
	says := func(what string, want int64) {
		t.Helper()
		if got, all := s.shares.held(owner), s.shares.held(everybody); got != want || all != want {
			t.Errorf("%s: an owner holds %d places, and all together hold %d, not %d", what, got, all, want)
		}
	}
	says("ten flows", 20)
	lasts := s.patience
	s.patience = *patience()
	for _, o := range []uint32{owner, everybody} {
		atomic.AddUint32(&s.shares.all[o].Lent, 300)
	}
	r.pass(s)
	says("300 were lent twice", 20)
	s.shares.giveBack(owner, 7)
	r.pass(s)
	says("seven were returned twice", 20)
	s.patience = lasts
	waitTick(t)
	r.pass(s)
	says("all are over", 0)
	s.patience = *patience()
	c := r.open("192.0.2.9:4000", "203.0.113.1:80")
	says("one", 2)
	c.ask("FA seq=6")
	c.answer("FA seq=6")
	c.ask("S")
	says("which was ended, and began anew", 0)
}

// Where no port is free, a new client gets that of a client that has not shown that it is there, and no other.
func TestShares_ports(t *testing.T) {
	const ports = 64
	r := newPacketRunWith(t, sharedRows, packetOptions{Translations: 1 << 13, Ports: portRange{1024, ports}})
	open := r.open("192.0.2.9:4000", "192.0.2.1:30080")
	for i := range 3 * ports {
		c := connection{packetRun: r, protocol: "tcp", client: fmt.Sprintf("198.18.0.%d:4000", i), service: "192.0.2.1:30080"}
		c.ask("S")
		if c.backend != "10.244.1.11:8080" || !c.answer("SA") {
			t.Fatalf("client %d: %s > %s", i, c.own, c.backend)
		}
	}
	late := r.open("192.0.2.9:4001", "192.0.2.1:30080")
	if !open.lives() || !late.lives() {
		t.Errorf("the first one lives: %t; the last one: %t", open.lives(), late.lives())
	}
}
