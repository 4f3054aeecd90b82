package ebpf

import (
	"bytes"
	"cmp"
	"errors"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/tools/txtar"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/model"
)

// attachedClients are how many the programs of a packetRun remember.
const attachedClients = 1 << 10

// packetRun sends packets through the programs, which are attached to nothing.
type packetRun struct {
	testing.TB
	programs *ebpf.Collection
	tables   *tables
	rows     *model.State
	before   func() // each packet; nil: nothing
	dir      string // of its sweeps
}

func newPacketRun(t testing.TB, rows string) packetRun {
	t.Helper()
	return newPacketRunWith(t, rows, packetOptions{Translations: 1024})
}

// newPacketRunWith is for options that say more than the node's addresses and the ports for clients.
func newPacketRunWith(t testing.TB, rows string, o packetOptions) packetRun {
	t.Helper()
	s, err := model.ParseState(rows)
	if err != nil {
		t.Fatal(err)
	}
	tables := newSet(t, s)
	sockets, err := (&Plane{sizes: Sizes{Affinities: attachedClients}}).loadSockets(tables.sets)
	if err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(sockets.Close)
	o.Ports = cmp.Or(o.Ports, portRange{1024, 30000})
	o.Maps = map[string]*ebpf.Map{}
	for _, name := range []string{objectsMapAffinities, objectsMapRefusals, objectsMapShares} {
		o.Maps[name] = sockets.Maps[name]
	}
	programs, err := newPackets(tables.sets, o)
	if err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(programs.Close)
	node := anyDevice(netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("fd00::c000:201"))
	node[addrKey(-1, anywhere(true))] = netip.MustParseAddr("192.0.2.1")
	node[addrKey(-2, anywhere(true))] = netip.MustParseAddr("192.0.2.77")
	if err := node.put(programs.Maps[packetsMapNodeAddrs], nil); err != nil {
		t.Fatal(err)
	}
	return packetRun{TB: t, programs: programs, tables: tables, rows: s, dir: t.TempDir()}
}

// newSet has a set of tables in force, that hold s.
func newSet(t testing.TB, s *model.State) *tables {
	t.Helper()
	sets, err := newSets()
	if errors.Is(err, os.ErrPermission) || errors.Is(err, ebpf.ErrNotSupported) {
		lack.Skip(t, lack.Root, err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sets.close() })
	tables, err := newTables(sets, capacityFor(s), (&dataplane.Config{}).Inject)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(tables.close)
	tables.packets = true
	if err := errors.Join(tables.load(s), sets.putInForce(tables.Maps, s.Pods, tables.fault)); err != nil {
		t.Fatal(err)
	}
	return tables
}

// change has other rows in force.
func (r packetRun) change(rows string) {
	r.Helper()
	s, err := model.ParseState(rows)
	if err == nil {
		err = r.tables.apply(s, model.Diff(r.rows, s))
	}
	if err != nil {
		r.Fatal(err)
	}
}

// through is what becomes of a packet at a hook.
func (r packetRun) through(hook string, in packet) string {
	r.Helper()
	program := map[string]string{
		"lan": packetsProgFromAnywhere, "pod": packetsProgFromPods, "out": packetsProgLeave,
	}[hook]
	if program == "" {
		r.Fatalf("no hook is called %q", hook)
	}
	if r.before != nil {
		r.before()
	}
	run := ebpf.RunOptions{Data: in.bytes(), DataOut: make([]byte, 512)}
	result, err := r.programs.Programs[program].Run(&run)
	if err != nil {
		r.Fatal(err)
	}
	var back string
	switch int32(result) {
	case 2: // TC_ACT_SHOT
		return "dropped"
	case 7: // TC_ACT_REDIRECT
		back = "back "
		if sent := slices.Concat(run.DataOut[6:12], run.DataOut[:6]); !bytes.Equal(sent, run.Data[:12]) {
			back = "to another station "
		}
	case -1: // TC_ACT_UNSPEC
	default:
		r.Errorf("program %s returns %d", program, int32(result))
	}
	out, err := decode(run.DataOut)
	if err != nil {
		r.Fatalf("%v: % x", err, run.DataOut)
	}
	if out.String() == in.String() {
		return "the same"
	}
	return back + out.String()
}

// play sends packets one after the other; see testdata.
func (r packetRun) play(lines string) {
	r.Helper()
	port := "PORT"
	for line := range strings.Lines(lines) {
		in, want, ok := strings.Cut(strings.TrimSpace(strings.ReplaceAll(line, "PORT", port)), "->")
		hook, text, _ := strings.Cut(in, " ")
		p, err := parsePacket(text)
		if err != nil || !ok {
			r.Fatalf("%q: %v", line, err)
		}
		got, want := r.through(hook, p), strings.TrimSpace(want)
		if port == "PORT" {
			pattern := strings.ReplaceAll(regexp.QuoteMeta(want), port, `(\d+)`)
			if chosen := regexp.MustCompile(pattern).FindStringSubmatch(got); len(chosen) > 1 {
				port, want = chosen[1], strings.ReplaceAll(want, "PORT", chosen[1])
			}
		}
		if got != want {
			r.Errorf("%s %s -> %s; want %s", hook, p, got, want)
		}
	}
}

// playAll plays the tables of a file, each with programs of its own. It plays each table twice: while it is not known
// which flows there are, and with that found out anew before each packet. The first part of the file are the rows.
func playAll(t *testing.T, file string, options func(t *testing.T, table string) packetOptions) {
	t.Helper()
	tables, err := txtar.ParseFile(file)
	if err != nil {
		t.Fatal(err)
	}
	rows := string(tables.Files[0].Data)
	for _, table := range tables.Files[1:] {
		t.Run(table.Name, func(t *testing.T) {
			t.Parallel()
			newPacketRunWith(t, rows, options(t, table.Name)).play(string(table.Data))
		})
		t.Run(table.Name+", noted", func(t *testing.T) {
			t.Parallel()
			r := newPacketRunWith(t, rows, options(t, table.Name))
			s := r.sweep(patience())
			r.before = func() { r.pass(s) }
			r.play(string(table.Data))
		})
	}
}

func TestPackets(t *testing.T) {
	playAll(t, "testdata/packets.txtar", func(*testing.T, string) packetOptions {
		return packetOptions{Translations: 1024}
	})
}
