package ebpf

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

const sweptRows = `
backend default/web:http cluster 10.244.1.11:8080 local
backend default/web:dns cluster 10.244.1.12:5353 local
backend default/web:s cluster 10.244.1.13:38412 local
frontend 203.0.113.1:38412/sctp any forward default/web:s cluster snat never
frontend 192.0.2.1:30080/tcp any forward default/web:http cluster snat offcluster
frontend 203.0.113.1:80/tcp any forward default/web:http cluster snat never
frontend 203.0.113.1:53/udp any forward default/web:dns cluster snat never
`

// swept is a packetRun whose flows may be silent for ever, and a sweep to which some may be for no time at all. (To the
// programs they may not: two packets of a flow are as far apart as a slow machine has them.)
func swept(t *testing.T, o packetOptions, impatient ...packetsPhase) (packetRun, *sweep) {
	t.Helper()
	p := phases{}
	for i := range p {
		p[i] = 1 << 20
	}
	patient := p
	for _, i := range impatient {
		p[i] = 0
	}
	o.Patience = &patient
	r := newPacketRunWith(t, sweptRows, o)
	return r, r.sweep(&p)
}

// sweep makes one that is not started.
func (r packetRun) sweep(p *phases) *sweep {
	r.Helper()
	s, err := newSweep(r.programs.Maps, p, r.dir)
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() {
		if err := s.close(); err != nil {
			r.Error(err)
		}
	})
	return s
}

// pass looks through the table once, and returns how many flows were over.
func (r packetRun) pass(s *sweep) (gone int) {
	r.Helper()
	s.swept = false // it need not rest
	for more := true; more; more = s.passing {
		n, err := s.step()
		if err != nil {
			r.Fatal(err)
		}
		gone += n
	}
	return gone
}

// flows are the translations that there are.
func (r packetRun) flows() string {
	r.Helper()
	var key packetsTuple
	var t packetsTranslation
	var lines []string
	for i := r.programs.Maps[packetsMapTranslations].Iterate(); i.Next(&key, &t); {
		at := map[packetsHook]string{packetsHookINGRESS: "in", packetsHookEGRESS: "out"}[key.Hook]
		lines = append(lines, fmt.Sprintf("%s %s > %s", at, r.endpoint(key.Src), r.endpoint(key.Dst)))
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

func (packetRun) endpoint(e packetsEndpoint) string {
	return objectsEndpoint{Addr: objectsAddr(e.Addr), Port: e.Port}.addrPort().String()
}

// sent sends packets of which only the effect counts.
func (r packetRun) sent(lines ...string) {
	r.Helper()
	for _, line := range lines {
		hook, text, _ := strings.Cut(line, " ")
		p, err := parsePacket(text)
		if err != nil {
			r.Fatal(err)
		}
		if out := r.through(hook, p); out == "dropped" {
			r.Errorf("%s: %s", line, out)
		}
	}
}

// sweepCase is what packets leave behind, of which the phases have no time.
type sweepCase struct {
	impatient []packetsPhase
	packets   []string
	want      string
}

func sweepCases(t *testing.T, cases map[string]sweepCase) {
	t.Helper()
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, s := swept(t, packetOptions{Translations: 1024}, c.impatient...)
			r.sent(c.packets...)
			waitTick(t)
			r.pass(s)
			if got := r.flows(); got != c.want {
				t.Errorf("left are\n%s\nwant\n%s", got, c.want)
			}
		})
	}
}

// The entries that follow from a flow go with it, and nothing else does.
func TestSweep(t *testing.T) {
	const (
		kept   = "tcp 192.0.2.9:4000 > 203.0.113.1:80 S"
		hidden = "tcp 192.0.2.8:4000 > 192.0.2.1:30080 S"
	)
	sweepCases(t, map[string]sweepCase{
		"beginning": {[]packetsPhase{packetsPhaseBEGINNING}, []string{"lan " + kept, "lan " + hidden}, ""},
		"answered": {[]packetsPhase{packetsPhaseBEGINNING}, []string{
			"lan " + kept, "out tcp 10.244.1.11:8080 > 192.0.2.9:4000 SA", "lan tcp 192.0.2.9:4000 > 203.0.113.1:80 A ack=7",
		}, ""},
		"open": {[]packetsPhase{packetsPhaseBEGINNING, packetsPhaseHALF_CLOSED, packetsPhaseOVER}, []string{
			"lan " + kept, "out tcp 10.244.1.11:8080 > 192.0.2.9:4000 SA", "lan tcp 192.0.2.9:4000 > 203.0.113.1:80 A ack=6",
			"lan " + hidden,
		}, "in 192.0.2.9:4000 > 203.0.113.1:80\nout 10.244.1.11:8080 > 192.0.2.9:4000"},
		"one side has ended": {[]packetsPhase{packetsPhaseTCP_OPEN, packetsPhaseBEGINNING, packetsPhaseOVER}, []string{
			"lan " + kept, "out tcp 10.244.1.11:8080 > 192.0.2.9:4000 SA", "lan tcp 192.0.2.9:4000 > 203.0.113.1:80 FA ack=6",
		}, "in 192.0.2.9:4000 > 203.0.113.1:80\nout 10.244.1.11:8080 > 192.0.2.9:4000"},
		"both sides have ended": {[]packetsPhase{packetsPhaseOVER}, []string{
			"lan " + kept, "out tcp 10.244.1.11:8080 > 192.0.2.9:4000 SA", "lan tcp 192.0.2.9:4000 > 203.0.113.1:80 FA ack=6",
			"out tcp 10.244.1.11:8080 > 192.0.2.9:4000 FA",
		}, ""},
		"one side has ended, and a packet says that the other one has": {[]packetsPhase{packetsPhaseOVER, packetsPhaseBEGINNING}, []string{
			"lan " + kept, "out tcp 10.244.1.11:8080 > 192.0.2.9:4000 SA", "lan tcp 192.0.2.9:4000 > 203.0.113.1:80 FA ack=6",
			"out tcp 10.244.1.11:8080 > 192.0.2.9:4000 FA seq=400000",
		}, "in 192.0.2.9:4000 > 203.0.113.1:80\nout 10.244.1.11:8080 > 192.0.2.9:4000"},
		"reset by the backend": {[]packetsPhase{packetsPhaseOVER}, []string{
			"lan " + kept, "out tcp 10.244.1.11:8080 > 192.0.2.9:4000 RA", "lan " + hidden,
		}, strings.Join([]string{
			"in 10.244.1.11:8080 > 192.0.2.1:4000", "in 192.0.2.8:4000 > 192.0.2.1:30080",
			"out 10.244.1.11:8080 > 192.0.2.8:4000", "out 192.0.2.8:4000 > 10.244.1.11:8080",
		}, "\n")},
		"reset by the client": {[]packetsPhase{packetsPhaseOVER}, []string{"lan " + hidden, "lan tcp 192.0.2.8:4000 > 192.0.2.1:30080 R"}, ""},
		"reset by one packet": {[]packetsPhase{packetsPhaseOVER, packetsPhaseBEGINNING, packetsPhaseHALF_CLOSED, packetsPhaseRESET}, []string{
			"lan " + kept, "out tcp 10.244.1.11:8080 > 192.0.2.9:4000 SA", "lan tcp 192.0.2.9:4000 > 203.0.113.1:80 A ack=6",
			"lan tcp 192.0.2.9:4000 > 203.0.113.1:80 R seq=400000", "lan tcp 192.0.2.9:4000 > 203.0.113.1:80 R seq=4294500000",
			"out tcp 10.244.1.11:8080 > 192.0.2.9:4000 R seq=400000",
		}, "in 192.0.2.9:4000 > 203.0.113.1:80\nout 10.244.1.11:8080 > 192.0.2.9:4000"},
		"reset when it was open": {[]packetsPhase{packetsPhaseRESET}, []string{
			"lan " + kept, "out tcp 10.244.1.11:8080 > 192.0.2.9:4000 SA", "lan tcp 192.0.2.9:4000 > 203.0.113.1:80 A ack=6",
			"lan tcp 192.0.2.9:4000 > 203.0.113.1:80 R seq=6",
		}, ""},
		"reset in the middle of it": {[]packetsPhase{packetsPhaseRESET}, []string{
			"lan " + kept, "out tcp 10.244.1.11:8080 > 192.0.2.9:4000 SA", "lan tcp 192.0.2.9:4000 > 203.0.113.1:80 A ack=6",
			"lan tcp 192.0.2.9:4000 > 203.0.113.1:80 A ack=6 seq=65530", "lan tcp 192.0.2.9:4000 > 203.0.113.1:80 A ack=6 seq=131000",
			"lan tcp 192.0.2.9:4000 > 203.0.113.1:80 A ack=6 seq=196600", "lan tcp 192.0.2.9:4000 > 203.0.113.1:80 R seq=196600",
		}, ""},
		"datagrams": {[]packetsPhase{packetsPhaseUDP_ASKING}, []string{
			"lan udp 192.0.2.9:4000 > 203.0.113.1:53", "out udp 10.244.1.12:5353 > 192.0.2.9:4000",
		}, ""},
	})
}

// Only its ends end an association.
func TestSweep_associations(t *testing.T) {
	sweepCases(t, map[string]sweepCase{
		"an association that begins": {[]packetsPhase{packetsPhaseOVER}, []string{
			"lan sctp 192.0.2.9:4000 > 203.0.113.1:38412 init own=70000", "out sctp 10.244.1.13:38412 > 192.0.2.9:4000 abort tag=70000",
		}, ""},
		"an association": {[]packetsPhase{packetsPhaseBEGINNING, packetsPhaseRESET}, []string{
			"lan sctp 192.0.2.9:4000 > 203.0.113.1:38412 init own=7000000", "out sctp 10.244.1.13:38412 > 192.0.2.9:4000 init-ack tag=7000000 own=9000000",
			"lan sctp 192.0.2.9:4000 > 203.0.113.1:38412 tag=9000000", "lan sctp 192.0.2.9:4000 > 203.0.113.1:38412 abort tag=8000000",
			"out sctp 10.244.1.13:38412 > 192.0.2.9:4000 abort tag=8000000",
		}, "in 192.0.2.9:4000 > 203.0.113.1:38412\nout 10.244.1.13:38412 > 192.0.2.9:4000"},
		"an association that a forged packet may belong to": {[]packetsPhase{packetsPhaseBEGINNING}, []string{
			"lan sctp 192.0.2.9:4000 > 203.0.113.1:38412 init own=7000000", "out sctp 10.244.1.13:38412 > 192.0.2.9:4000 init-ack tag=7000000 own=9000000",
			"lan sctp 192.0.2.9:4000 > 203.0.113.1:38412 tag=8000000",
		}, ""},
		"an association that has ended": {[]packetsPhase{packetsPhaseRESET}, []string{
			"lan sctp 192.0.2.9:4000 > 203.0.113.1:38412 init own=7000000", "out sctp 10.244.1.13:38412 > 192.0.2.9:4000 init-ack tag=7000000 own=9000000",
			"lan sctp 192.0.2.9:4000 > 203.0.113.1:38412 tag=9000000", "lan sctp 192.0.2.9:4000 > 203.0.113.1:38412 abort tag=9000000",
		}, ""},
	})
}

// waitTick waits until what happened is past, to the programs' clock.
func waitTick(t *testing.T) {
	t.Helper()
	began, err := now()
	for at := began; err == nil && at == began; {
		at, err = now()
	}
	if err != nil {
		t.Fatal(err)
	}
}

// Another program may have removed a part of a flow. The sweep removes the rest of it.
func TestSweep_orphans(t *testing.T) {
	r, s := swept(t, packetOptions{Translations: 1024})
	r.sent("lan tcp 192.0.2.8:4000 > 192.0.2.1:30080 S", "lan tcp 192.0.2.9:4001 > 192.0.2.1:30080 S")
	before := r.flows()
	age(t, r)
	r.pass(s)
	if got := r.flows(); got != before {
		t.Errorf("left of two flows are\n%s", got)
	}
	for key := range r.translations() {
		if key.Hook == packetsHookINGRESS && r.endpoint(key.Src) == "192.0.2.8:4000" {
			if err := r.programs.Maps[packetsMapTranslations].Delete(key); err != nil {
				t.Fatal(err)
			}
		}
	}
	r.pass(s)
	for line := range strings.Lines(r.flows()) {
		if strings.Contains(line, "192.0.2.8:4000") || strings.Contains(line, "192.0.2.1:4000") {
			t.Errorf("left is %s", line)
		}
	}
	if n := strings.Count(r.flows(), "\n") + 1; n != 4 {
		t.Errorf("%d translations are left, want 4 of one flow:\n%s", n, r.flows())
	}
}

func (r packetRun) translations() map[packetsTuple]packetsTranslation {
	all := map[packetsTuple]packetsTranslation{}
	var key packetsTuple
	var t packetsTranslation
	for i := r.programs.Maps[packetsMapTranslations].Iterate(); i.Next(&key, &t); {
		all[key] = t
	}
	return all
}

// A program may use a flow while the sweep looks at it: one that was used after what is now there is not over.
func TestSweep_usedMeanwhile(t *testing.T) {
	r, s := swept(t, packetOptions{Translations: 1024})
	r.sent("lan tcp 192.0.2.8:4000 > 192.0.2.1:30080 S", "lan udp 192.0.2.9:4001 > 192.0.2.1:30053")
	before := r.flows()
	shift(t, r, 10)
	r.pass(s)
	if got := r.flows(); got != before || before == "" {
		t.Errorf("left of flows that are in use are\n%s\nthere were\n%s", got, before)
	}
}

// A packet comes when what follows from its flow is gone, and the flow is about to go: the flow goes on, with all of it.
func TestSweep_usedAtTheEnd(t *testing.T) {
	lack.Need(t, lack.Linux514)
	r, s := swept(t, packetOptions{Translations: 1024})
	r.sent("lan tcp 192.0.2.8:4000 > 192.0.2.1:30080 S")
	key := at(packetsHookINGRESS, unix.IPPROTO_TCP, endpointAt("192.0.2.8:4000"), endpointAt("192.0.2.1:30080"))
	read := r.translations()[key]
	if err := s.unlay(key, &read); err != nil {
		t.Fatal(err)
	}
	r.sent("lan tcp 192.0.2.8:4000 > 192.0.2.1:30080 FA")
	beginList(t, s.filter) // as another pass would, that does not find what is about to go
	if gone, err := s.end(key, &read); gone || err != nil {
		t.Errorf("a flow that is used is over: %t, %v", gone, err)
	}
	s.filter.finish()
	r.play(`lan tcp 192.0.2.8:4000 > 192.0.2.1:30080 A -> tcp 192.0.2.8:4000 > 10.244.1.11:8080 A
out tcp 192.0.2.8:4000 > 10.244.1.11:8080 A -> tcp 192.0.2.1:4000 > 10.244.1.11:8080 A
pod tcp 10.244.1.11:8080 > 192.0.2.1:4000 A -> tcp 10.244.1.11:8080 > 192.0.2.8:4000 A
out tcp 10.244.1.11:8080 > 192.0.2.8:4000 A -> tcp 192.0.2.1:30080 > 192.0.2.8:4000 A`)
	read = r.translations()[key]
	if gone, err := s.end(key, &read); !gone || err != nil {
		t.Errorf("a flow that nobody uses is over: %t, %v", gone, err)
	}
}

// A plane sweeps by itself, however seldom the engine calls Audit.
func TestSweep_byItself(t *testing.T) {
	t.Parallel()
	p := planeOf(t, outsideBedOf(t, testbed.Spec{Cgroup: true}), outsideRows)
	began, err := now()
	if err != nil {
		t.Fatal(err)
	}
	key := at(packetsHookINGRESS, unix.IPPROTO_TCP, endpointAt("192.0.2.9:4000"), endpointAt("192.0.2.1:30080"))
	flow := packetsTranslation{
		Src: key.Src, Dst: endpointAt("10.244.1.11:8080"), Last: began - 2*packetsTicks(patience()[packetsPhaseBEGINNING])*packetsTicksTICKS,
	}
	flows := p.memory[packetsMapTranslations]
	if err := flows.Put(key, flow); err != nil {
		t.Fatal(err)
	}
	// As programs do. Without Laid, a pass that is over now, and has read an empty table, has none begin after it.
	atomic.StoreUint32(&p.sweep.activity.Laid, 1)
	atomic.StoreUint32(&p.sweep.activity.Busy, 1)
	eventually.Nil(t, "the flow is gone", func() error {
		err := flows.Lookup(key, &flow)
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil
		}
		return errors.Join(err, errors.New("it is there"))
	})
}

// age makes all translations so old that they are no longer about to become parts of flows.
func age(t *testing.T, r packetRun) {
	t.Helper()
	shift(t, r, -int(orphanAge/packetsTicksTICKS))
}

// shift changes by some seconds when all translations were used.
func shift(t *testing.T, r packetRun, by int) {
	t.Helper()
	for key, value := range r.translations() {
		value.Last += packetsTicks(by) * packetsTicksTICKS
		if err := r.programs.Maps[packetsMapTranslations].Put(key, value); err != nil {
			t.Fatal(err)
		}
	}
}

// A node has some 30,000 ports for the clients of one backend, and any number of connections one after the other.
func TestSweep_ports(t *testing.T) {
	const connections, batch = 40_000, 10_000
	r, s := swept(t, packetOptions{Translations: 1 << 18}, packetsPhaseOVER)
	for i := range connections {
		from := fmt.Sprintf("192.0.%d.%d:%d", 2+i/200%200, 1+i%200, 4000+i/40_000)
		r.sent("lan tcp "+from+" > 192.0.2.1:30080 S", "lan tcp "+from+" > 192.0.2.1:30080 R")
		if i%batch == batch-1 {
			waitTick(t)
			r.pass(s)
		}
	}
	if left := r.flows(); left != "" {
		t.Errorf("%d translations are left", strings.Count(left, "\n"))
	}
}

// Of an owner whose share is used up those flows go that were silent for longest. Others' stay.
func TestSweep_short(t *testing.T) {
	r := newPacketRunWith(t, sharedRows, packetOptions{Translations: 1 << 12})
	s := r.sweep(patience())
	victim := r.open("192.0.2.7:4000", "203.0.113.1:81")
	quiet := r.open("192.0.2.8:4000", "203.0.113.1:80")
	shift(t, r, -13*60*60)
	for i := 0; !s.shares.isShort(ownerOf(model.PoolID{Service: "one/web:http"})); i++ {
		r.open(fmt.Sprintf("192.0.2.9:%d", 1024+i), "203.0.113.1:80")
	}
	before := len(r.translations())
	for range 2 {
		r.pass(s)
	}
	if n := len(r.translations()); n != before-2 || quiet.lives() || !victim.lives() {
		t.Errorf("%d of %d translations are left; the quiet one of its owner is: %t; another owner's: %t",
			n, before, quiet.lives(), victim.lives())
	}
}

func TestTranslationsFor(t *testing.T) {
	for memory, want := range map[uint64]uint32{0: 1 << 18, 4 << 30: 1 << 18, 16 << 30: 1 << 19, 1 << 40: 1 << 21} {
		if got := translationsFor(memory); got != want {
			t.Errorf("%d GiB of memory: %d translations, want %d", memory>>30, got, want)
		}
	}
}

// While there are no flows the programs do not look for any; the first packet of one is enough to make them look again.
func TestSweep_idle(t *testing.T) {
	r, s := swept(t, packetOptions{Translations: 1024}, packetsPhaseOVER)
	for range 3 {
		r.pass(s)
		if s.activity.Busy != 0 {
			t.Error("there are no flows, and the programs look for them")
		}
		if gone, err := s.step(); gone != 0 || s.passing || err != nil {
			t.Errorf("there are no flows, and a pass removes %d: %v", gone, err)
		}
		r.play(`lan tcp 192.0.2.9:4000 > 192.0.2.1:30080 S        -> tcp 192.0.2.9:4000 > 10.244.1.11:8080 S
out tcp 192.0.2.9:4000 > 10.244.1.11:8080 S       -> tcp 192.0.2.1:4000 > 10.244.1.11:8080 S
lan tcp 192.0.2.9:4000 > 192.0.2.1:30080 R        -> tcp 192.0.2.9:4000 > 10.244.1.11:8080 R`)
		waitTick(t)
		r.pass(s)
		if s.activity.Busy == 0 {
			t.Error("a flow was there when the pass began")
		}
	}
}

// The plane counts packets to the last one of a flow that is over.
func TestTraffic(t *testing.T) {
	r, s := swept(t, packetOptions{Translations: 1024}, packetsPhaseOVER)
	r.sent(
		"lan tcp 192.0.2.9:4000 > 203.0.113.1:80 S",
		"out tcp 10.244.1.11:8080 > 192.0.2.9:4000 SA",
		"lan tcp 192.0.2.9:4000 > 203.0.113.1:80 A",
		"lan tcp 192.0.2.9:4000 > 203.0.113.1:80 FA",
		"out tcp 10.244.1.11:8080 > 192.0.2.9:4000 FA",
		"lan tcp 192.0.2.9:4000 > 203.0.113.1:80 A",
		"lan tcp 192.0.2.8:4000 > 192.0.2.1:30080 S",
		"out tcp 192.0.2.8:4000 > 10.244.1.11:8080 S",
		"pod tcp 10.244.1.11:8080 > 192.0.2.1:4000 SA",
		"out tcp 10.244.1.11:8080 > 192.0.2.8:4000 SA",
		"lan tcp 192.0.2.8:4000 > 192.0.2.1:30080 R",
	)
	waitTick(t)
	r.pass(s)
	got, err := (&Plane{sweep: s, memory: s.maps}).traffic()
	if err != nil {
		t.Fatal(err)
	}
	const size = 45 // of a packet: IP, TCP, hello
	want := packetsTraffic{Packets: [2]uint64{6, 3}, Bytes: [2]uint64{6 * size, 3 * size}}
	name := poolName(model.PoolID{Service: "default/web:http"})
	if len(got) != 1 {
		t.Fatalf("traffic of %d backends: %v", len(got), slices.Collect(maps.Keys(got)))
	}
	for key, have := range got {
		if key.Pool != name || r.endpoint(key.Backend) != "10.244.1.11:8080" || have != want {
			t.Errorf("%s has %+v, want %+v", r.endpoint(key.Backend), have, want)
		}
	}
}

// TestBook_bounded: flows that go may have had any number of backends.
func TestBook_bounded(t *testing.T) {
	s := &sweep{rest: map[packetsTrafficKey]packetsTraffic{}}
	flow := packetsTranslation{Pool: 1, Packets: 1, Bytes: 100}
	for i := range uint32(trafficked + 10) {
		flow.Dst.Addr.Word[3] = i
		s.book(&flow, packetsDirectionTO_BACKEND, &flow)
	}
	if n := len(s.rest); n != trafficked {
		t.Errorf("the packets of %d backends are remembered, want %d", n, trafficked)
	}
	flow.Dst.Addr.Word[3] = 0
	s.book(&flow, packetsDirectionTO_BACKEND, &flow)
	sum := s.rest[packetsTrafficKey{Pool: 1, Backend: flow.Dst}]
	if n := sum.Packets[packetsDirectionTO_BACKEND]; n != 2 {
		t.Errorf("the first one has %d packets, want 2", n)
	}
}
