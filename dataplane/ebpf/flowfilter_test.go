package ebpf

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// Flows go on as they began, whenever the table is looked through, and whoever does so beside.
func TestNotes_random(t *testing.T) {
	random := seeded(t)
	const flows = 600
	r := newPacketRunWith(t, sweptRows, packetOptions{Translations: 16 * flows * processors()}) // none ends for another
	sweeps := []*sweep{r.sweep(patience()), r.sweep(patience())}
	for _, s := range sweeps { // a pass takes several steps
		s.keys, s.values = s.keys[:128], s.values[:128]
	}
	services := []string{"tcp %s > 192.0.2.1:30080", "tcp %s > 203.0.113.1:80", "udp %s > 203.0.113.1:53"}
	ways := map[string]string{} // what becomes of a flow's packets
	for i := range flows {
		flow := fmt.Sprintf(services[random.IntN(len(services))], fmt.Sprintf("198.51.100.%d:%d", i%250, 1024+i))
		r.way(flow, true)
		ways[flow] = r.way(flow, false)
		if random.IntN(4) > 0 {
			continue
		}
		s := sweeps[random.IntN(len(sweeps))]
		s.swept = false
		for range random.IntN(4) {
			if _, err := s.step(); err != nil {
				t.Fatal(err)
			}
		}
	}
	for range 3 {
		for flow, want := range ways {
			if got := r.way(flow, false); got != want {
				t.Errorf("%s: its packets become\n%snow, and before\n%s", flow, got, want)
			}
		}
		r.pass(sweeps[0])
		if sweeps[0].filter.memory.InForce == 0 {
			t.Error("after a pass by one alone it is not known which flows there are")
		}
	}
}

// way is what becomes of a client's packet, and of the answer to it, at each hook.
func (r packetRun) way(flow string, begins bool) string {
	r.Helper()
	words := map[string]string{"tcp": " A", "udp": ""}[flow[:3]]
	if begins {
		words = strings.Replace(words, "A", "S", 1)
	}
	var way strings.Builder
	send := func(hook, text string) packet {
		p, err := parsePacket(text)
		if err != nil {
			r.Fatal(err)
		}
		out := r.through(hook, p)
		fmt.Fprintf(&way, "%s %s -> %s\n", hook, p, out)
		if out == "the same" {
			return p
		}
		if p, err = parsePacket(out); err != nil {
			r.Fatalf("%s%v", &way, err)
		}
		return p
	}
	sent := send("lan", flow+words)
	sent = send("out", sent.String())
	answer := send("pod", fmt.Sprintf("%s %s > %s%s", flow[:3], sent.dst, sent.src, strings.Replace(words, "S", "SA", 1)))
	send("out", answer.String())
	return way.String()
}

func beginList(t *testing.T, n *flowFilter) {
	t.Helper()
	if err := n.begin(); err != nil {
		t.Fatal(err)
	}
}

// A list that another pass may have emptied meanwhile is never in force.
func TestNotes_passes(t *testing.T) {
	r := newPacketRun(t, sweptRows)
	a, b := r.sweep(patience()).filter, r.sweep(patience()).filter
	key := packetsTuple{Hook: packetsHookINGRESS, Protocol: 6}
	says := func(what string, want bool) {
		t.Helper()
		inForce := a.memory.InForce
		if got := inForce == 0 || a.memory.Lists[inForce-1][noteOf(&key)] == 1; got != want {
			t.Errorf("%s: list %d is in force, and says %v", what, inForce, got)
		}
	}
	beginList(t, a)
	a.add(&key)
	beginList(t, b)
	a.finish()
	says("another pass has begun", true)
	b.add(&key)
	b.finish()
	says("which had it", true)
	beginList(t, a)
	says("the next one has begun", true)
	a.finish()
	says("and had it not", false)
	beginList(t, a)
	a.addToBoth(&key)
	a.finish()
	says("it was put back in mid-pass", true)

	dir, err := a.lock()
	if err != nil {
		t.Fatal(err)
	}
	beginList(t, b)
	dir.Close()
	beginList(t, a)
	a.add(&key)
	b.finish()
	a.finish()
	says("another one was just beginning", true)

	former := r.sweep(patience()).filter
	former.table++
	atomic.StoreUint32(&a.memory.Table, a.table)
	beginList(t, former)
	former.add(&key)
	former.finish()
	says("a process with another table looks through that, and nothing is known", true)
	if inForce := a.memory.InForce; inForce != 0 {
		t.Errorf("list %d of another table is in force", inForce)
	}
	former.reset()
	beginList(t, former)
	former.finish()
	says("programs have another table", false)
	beginList(t, a)
	a.finish()
	says("and go on with that", false)
	beginList(t, former)
	a.reset()
	former.finish()
	says("until this one is synced again", true)
	beginList(t, a)
	a.finish()
	says("and looks through its own", false)
	if err := ignoreFlowFilter(r.programs.Maps[packetsMapNoted]); err != nil {
		t.Fatal(err)
	}
	says("what is noted is of another version", true)
}

// A process that is synced again, after another one that had another table, looks through its own.
func TestNotes_synced(t *testing.T) {
	t.Parallel()
	p := planeOf(t, outsideBedOf(t, testbed.Spec{Cgroup: true}), outsideRows)
	other, err := openFlowFilter(p.memory[packetsMapNoted], p.memory[packetsMapTranslations], t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer other.close()
	other.table++
	other.reset()
	beginList(t, other)
	other.finish()
	s, err := model.ParseState(outsideRows)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Sync(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	if got := atomic.LoadUint32(&other.memory.Table); got != p.sweep.filter.table {
		t.Errorf("what is noted is of table %d, and programs have table %d", got, p.sweep.filter.table)
	}
}
