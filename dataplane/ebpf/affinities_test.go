package ebpf

import (
	"fmt"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"fairlead.dev/fairlead/model"
)

// attachedRows are of two owners, and their clients keep their backends.
const attachedRows = `
pool one/web:http cluster affinity 1h0m0s
pool one/dns:dns cluster affinity 1h0m0s
pool two/web:http cluster affinity 1h0m0s
backend one/web:http cluster 10.244.1.11:8080 local
backend one/web:http cluster 10.244.1.12:8080 local
backend one/web:http cluster 10.244.1.13:8080 weight 3
backend one/dns:dns cluster 10.244.1.11:5353 local
backend one/dns:dns cluster 10.244.1.12:5353 local
backend two/web:http cluster 10.244.1.11:8081 local
backend two/web:http cluster 10.244.1.12:8081 local
frontend 203.0.113.1:80/tcp any forward one/web:http cluster snat never
frontend 203.0.113.1:53/udp any forward one/dns:dns cluster snat never
frontend 203.0.113.1:81/tcp any forward two/web:http cluster snat never
`

// attached are the clients of a pool that are remembered.
func (r packetRun) attached(service string) (n int) {
	r.Helper()
	name := poolName(model.PoolID{Service: service})
	err := each(r.programs.Maps[objectsMapAffinities], func(key objectsAffinityKey, _ objectsAffinity) error {
		if key.Pool == name {
			n++
		}
		return nil
	})
	if err != nil {
		r.Fatal(err)
	}
	return n
}

// plane is one that remembers the same.
func (r packetRun) plane() *Plane {
	return &Plane{memory: map[string]*ebpf.Map{
		objectsMapAffinities: r.programs.Maps[objectsMapAffinities], objectsMapShares: r.programs.Maps[objectsMapShares],
	}}
}

// A client that begins connections and does not go on with them is not remembered. All the same its connections reach
// one backend if they begin together. The backends share such clients by weight.
func TestAttached_beginning(t *testing.T) {
	r := newPacketRunWith(t, attachedRows, packetOptions{Translations: 1 << 16, Secret: 4711})
	clients, reached := 2400, map[string]int{} // so many that chance alone fails once in ten million times
	for i := range clients {
		client := fmt.Sprintf("198.18.%d.%d", i>>8, i&255)
		var had string
		for port := 4000; port < 4004; port++ {
			c := connection{packetRun: r, protocol: "tcp", client: fmt.Sprintf("%s:%d", client, port), service: "203.0.113.1:80"}
			c.ask("S")
			c.answer("SA")
			c.ask("A ack=4711")
			if had == "" {
				had = c.backend
				reached[had]++
			}
			if c.backend != had {
				t.Errorf("client %s reaches %s and %s", client, had, c.backend)
			}
		}
	}
	if n := r.attached("one/web:http"); n != 0 {
		t.Errorf("%d clients are remembered", n)
	}
	for backend, share := range map[string]int{"10.244.1.11:8080": 480, "10.244.1.12:8080": 480, "10.244.1.13:8080": 1440} {
		if n := reached[backend]; n < share*3/4 || n > share*5/4 {
			t.Errorf("%d of %d clients reach %s", n, clients, backend)
		}
	}
}

// A client that has gone on after an answer keeps its backend when others come. So does one that was answered a datagram.
func TestAttached_lasting(t *testing.T) {
	const more = "backend one/web:http cluster 10.244.1.%d:8080 local\nbackend one/dns:dns cluster 10.244.1.%[1]d:5353 local\n"
	r := newPacketRunWith(t, attachedRows, packetOptions{Translations: 1 << 14})
	had := map[string]string{}
	for i := range 50 {
		client := fmt.Sprintf("198.18.0.%d", i)
		had[client] = r.open(client+":4000", "203.0.113.1:80").backend
		c := connection{packetRun: r, protocol: "udp", client: client + ":4000", service: "203.0.113.1:53"}
		c.ask("")
		c.answer("")
		had[client+" udp"] = c.backend
	}
	rows := attachedRows
	for i := range 20 {
		rows += fmt.Sprintf(more, 20+i)
	}
	r.change(rows)
	for i := range 50 {
		client := fmt.Sprintf("198.18.0.%d", i)
		c := connection{packetRun: r, protocol: "udp", client: client + ":4001", service: "203.0.113.1:53"}
		c.ask("")
		if got := r.open(client+":4001", "203.0.113.1:80").backend; got != had[client] || c.backend != had[client+" udp"] {
			t.Errorf("client %s had %s and %s, and reaches %s and %s", client, had[client], had[client+" udp"], got, c.backend)
		}
	}
}

// Whatever clients one owner's Services have, another owner's stay, and there is room for more of them. The audit names
// the one that has used up its share.
func TestAttached_owners(t *testing.T) {
	r := newPacketRunWith(t, attachedRows, packetOptions{Translations: 1 << 16})
	for i := range 50 {
		r.open(fmt.Sprintf("198.51.100.%d:4000", i), "203.0.113.1:81")
	}
	for i := range 2 * attachedClients {
		r.open(fmt.Sprintf("198.18.%d.%d:4000", i>>8, i&255), "203.0.113.1:80")
	}
	for i := range 20 {
		r.open(fmt.Sprintf("198.51.100.%d:4000", 100+i), "203.0.113.1:81")
	}
	if n := r.attached("two/web:http"); n != 70 {
		t.Errorf("of 70 clients of one owner %d are remembered", n)
	}
	if n := r.attached("one/web:http"); n < attachedClients*3/4 || n > attachedClients*9/10 {
		t.Errorf("of the other one's, %d of %d are remembered", n, attachedClients)
	}
	p := r.plane()
	p.tables = r.tables
	for _, when := range []string{"at once", "after a look"} {
		if got, err := p.usedUp(); err != nil || fmt.Sprint(got) != "[{one sessions}]" {
			t.Errorf("%s, used up are %v, %v", when, got, err)
		}
		if err := p.detach(); err != nil {
			t.Fatal(err)
		}
	}
}

// Entries that have expired are deleted, and make room. Those of an owner that has no room left expire sooner.
func TestAttached_over(t *testing.T) {
	r := newPacketRunWith(t, attachedRows, packetOptions{Translations: 1 << 16})
	p := r.plane()
	detach := func(what string, one, two int) {
		t.Helper()
		if err := p.detach(); err != nil {
			t.Fatal(err)
		}
		if a, b := r.attached("one/web:http"), r.attached("two/web:http"); a != one || b != two {
			t.Errorf("%s: %d and %d clients are remembered, not %d and %d", what, a, b, one, two)
		}
	}
	ago := func(d time.Duration) {
		t.Helper()
		m := p.memory[objectsMapAffinities]
		err := each(m, func(key objectsAffinityKey, a objectsAffinity) error {
			a.Last -= uint64(d)
			return m.Put(key, a)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	r.open("198.51.100.1:4000", "203.0.113.1:80")
	r.open("198.51.100.1:4000", "203.0.113.1:81")
	ago(40 * time.Minute)
	r.open("198.51.100.2:4000", "203.0.113.1:80")
	detach("40 minutes", 2, 1)
	ago(21 * time.Minute)
	detach("an hour for the first ones", 1, 0)
	ago(40 * time.Minute)
	detach("an hour for all", 0, 0)

	r.open("198.51.100.1:4001", "203.0.113.1:81")
	ago(40 * time.Minute)
	for i := range 2 * attachedClients {
		r.open(fmt.Sprintf("198.18.%d.%d:4000", i>>8, i&255), "203.0.113.1:80")
	}
	n := r.attached("one/web:http")
	detach("so many of one", n, 1)
	ago(10 * time.Minute)
	detach("half an hour is enough", n, 1)
	detach("a quarter of an hour is enough", n, 1)
	detach("an eighth is enough", 0, 1)
}
