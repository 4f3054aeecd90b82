package conntrack_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/iptables"
	"fairlead.dev/fairlead/dataplane/nftables"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/outcomestest"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/model"
)

// flowStage is a node whose plane has flowtables, with a client, a backend here and two on another node.
type flowStage struct {
	*stage
}

const flowRows = `
pods 10.244.0.0/16
pods fd00::af4:0/112
frontend 10.96.0.10:80/tcp any forward default/web cluster snat offcluster
frontend 192.0.2.1:30080/tcp any forward default/web cluster snat always
frontend [fd00::a60:a]:80/tcp any forward default/web cluster6 snat offcluster
frontend 10.96.0.10:53/udp any forward default/dns cluster snat offcluster
frontend 10.96.0.11:80/tcp any forward default/hooked cluster snat offcluster hooked
pool default/web cluster
backend default/web cluster (b):80
pool default/web cluster6
backend default/web cluster6 [fd00::af4:202]:80
pool default/dns cluster
backend default/dns cluster (b):53
pool default/hooked cluster
backend default/hooked cluster (b):80
`

// TestFlowtable has all that is said of flowtables tried in a kernel that has them.
func TestFlowtable(t *testing.T) {
	t.Parallel()
	if !testbed.HasFlowtables() {
		vm.Replay(t, "flowtables")
		return
	}
	for name, test := range map[string]func(*flowStage){
		"connections go past the hooks":     (*flowStage).bypass,
		"hooked rows do not":                (*flowStage).hooked,
		"a removed backend of UDP":          (*flowStage).removedUDP,
		"a removed backend of TCP":          (*flowStage).removedTCP,
		"devices come and go":               (*flowStage).devices,
		"another program filters":           (*flowStage).filtered,
		"another plane comes":               (*flowStage).switched,
		"nothing stays":                     (*flowStage).removed,
		"a restart, and without flowtables": (*flowStage).restart,
	} {
		t.Run(name, func(t *testing.T) { test(newFlowStage(t, dataplane.FlowtableUnlessFiltered)) })
	}
	t.Run("orphans", func(t *testing.T) {
		bed := outcomestest.NewOrphansBed(t, false)
		s := &flowStage{&stage{T: t, bed: bed, state: model.NewState()}}
		s.open(dataplane.FlowtableAlways)
		outcomestest.Orphans{TB: t, Bed: bed, SNAT: "never", From: []testbed.Place{testbed.Node, "client", testbed.Outside}}.
			Run(auditing{s.plane, s})
	})
}

func newFlowStage(t *testing.T, f dataplane.Flowtable) *flowStage {
	t.Helper()
	ports := []testbed.PodPort{{Protocol: model.UDP, Port: 53}, {Protocol: model.TCP, Port: 80}}
	s := &flowStage{&stage{T: t, state: model.NewState(), bed: testbed.Need(t, testbed.Spec{Pods: []testbed.PodSpec{
		{Name: "a", Ports: ports}, {Name: "b", Node: testbed.NodeB, Ports: ports}, {Name: "c", Node: testbed.NodeB, Ports: ports},
		{Name: "client"},
	}})}}
	s.open(f)
	s.must(flowRows)
	return s
}

func (s *flowStage) open(f dataplane.Flowtable) {
	s.Helper()
	err := s.bed.Do(testbed.Node, func() (err error) {
		s.plane, err = conntrack.Wrap(nftables.New)(dataplane.Config{Flowtable: f})
		return err
	})
	if err == nil {
		err = s.plane.Sync(s.Context(), s.state)
	}
	if err != nil {
		s.Fatal(err)
	}
	p := s.plane
	s.Cleanup(func() {
		if s.plane != p { // it is closed
			return
		}
		if err := errors.Join(p.Remove(context.WithoutCancel(s.Context())), p.Close()); err != nil {
			s.Error(err)
		}
	})
}

// audit does what the daemon does about once a second.
func (s *flowStage) audit() {
	s.Helper()
	r, err := s.plane.Audit(s.Context(), s.state, dataplane.Quick)
	if err == nil && len(r.Drifts) > 0 {
		err = s.plane.Repair(s.Context(), s.state, r)
	}
	if err != nil {
		s.Fatal(err)
	}
}

// auditing is a plane that is audited before anybody looks for orphans.
type auditing struct {
	dataplane.Dataplane
	s *flowStage
}

func (a auditing) Sync(ctx context.Context, s *model.State) error {
	a.s.state = s
	return a.Dataplane.Sync(ctx, s)
}

func (a auditing) Apply(ctx context.Context, s *model.State, c model.Change) error {
	a.s.state = s
	return a.Dataplane.Apply(ctx, s, c)
}

func (a auditing) ResetOrphans(ctx context.Context, gone dataplane.Gone) (int, error) {
	a.s.audit()
	return a.Dataplane.ResetOrphans(ctx, gone)
}

func (s *flowStage) nft(words ...string) string {
	s.Helper()
	return s.run("nft", words...)
}

func (s *flowStage) run(name string, words ...string) string {
	s.Helper()
	out, err := s.bed.Command(s.Context(), testbed.Node, name, words...).CombinedOutput()
	if err != nil {
		s.Fatalf("%s %s: %v: %s", name, words, err, out)
	}
	return string(out)
}

func (s *flowStage) connect(from testbed.Place, p model.Protocol, to string) *flow {
	s.Helper()
	c, err := s.bed.Dial(s.Context(), from, p, netip.MustParseAddrPort(to))
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { c.Close() })
	f := &flow{Conn: c}
	f.backend = s.ask(f)
	return f
}

// tracked is what connection tracking says of the client's connection.
func (s *flowStage) tracked(f *flow) string {
	s.Helper()
	ports := fmt.Sprintf(" sport=%d dport=%d ", port(f.LocalAddr()), port(f.RemoteAddr()))
	for line := range strings.Lines(s.run("cat", "/proc/net/nf_conntrack")) {
		if strings.Contains(line, ports) {
			return line
		}
	}
	return ""
}

func port(a net.Addr) uint16 { return netip.MustParseAddrPort(a.String()).Port() }

func (s *flowStage) offloaded(f *flow) bool {
	s.Helper()
	return strings.Contains(s.tracked(f), "[OFFLOAD]")
}

// inTable asks until the connection is in the flowtable.
func (s *flowStage) inTable(f *flow) {
	s.Helper()
	eventually.True(s, "the flowtable takes the connection", func() bool {
		s.ask(f)
		return s.offloaded(f)
	})
}

// seen is how many packets pass the hook while the connection is in use.
func (s *flowStage) seen(f *flow) int {
	s.Helper()
	s.nft("add table inet spy; add chain inet spy forward { type filter hook forward priority 0; }; " +
		fmt.Sprintf("add rule inet spy forward meta l4proto { tcp, udp } ct original proto-dst %d counter", port(f.RemoteAddr())))
	for range 20 {
		s.ask(f)
	}
	list := s.nft("list table inet spy")
	s.nft("delete table inet spy")
	var packets int
	_, count, _ := strings.Cut(list, "counter packets ")
	if _, err := fmt.Sscan(count, &packets); err != nil {
		s.Fatalf("%v:\n%s", err, list)
	}
	return packets
}

func (s *flowStage) bypass() {
	for _, c := range []struct {
		from     testbed.Place
		protocol model.Protocol
		to       string
	}{
		{"client", model.TCP, "10.96.0.10:80"}, {"client", model.TCP, "[fd00::a60:a]:80"}, {testbed.Outside, model.TCP, "192.0.2.1:30080"},
		{"client", model.UDP, "10.96.0.10:53"},
	} {
		s.Run(fmt.Sprint(c), func(t *testing.T) {
			s := &flowStage{&stage{T: t, bed: s.bed, plane: s.plane, state: s.state}}
			f := s.connect(c.from, c.protocol, c.to)
			s.inTable(f)
			if n := s.seen(f); n > 0 {
				t.Errorf("%d packets have passed the hook\n%s", n, s.tracked(f))
			}
		})
	}
}

func (s *flowStage) hooked() {
	f := s.connect("client", model.TCP, "10.96.0.11:80")
	if n := s.seen(f); n < 40 {
		s.Errorf("%d packets have passed the hook", n)
	}
	if s.offloaded(f) {
		s.Error("a connection of a hooked row is in the flowtable")
	}
	f = s.connect("client", model.TCP, "10.96.0.10:80")
	s.inTable(f)
	s.must(strings.ReplaceAll(flowRows, "web cluster snat offcluster", "web cluster snat offcluster hooked"))
	s.audit()
	if n := s.seen(f); n < 40 || s.offloaded(f) {
		s.Errorf("when the row becomes hooked, %d packets pass the hook", n)
	}
}

func (s *flowStage) removedUDP() {
	f := s.connect("client", model.UDP, "10.96.0.10:53")
	s.inTable(f)
	s.must(strings.ReplaceAll(flowRows, "(b):53", "(c):53"))
	if now := s.ask(f); now != "c" {
		s.Errorf("after b has left the Service, %s answers", now)
	}
	if line := s.tracked(f); strings.Contains(line, "[OFFLOAD]") {
		s.Error("still in the flowtable:", line)
	}
	s.audit()
	s.inTable(f)
}

func (s *flowStage) removedTCP() {
	f := s.connect("client", model.TCP, "10.96.0.10:80")
	s.inTable(f)
	s.must(strings.ReplaceAll(flowRows, "(b):80", "(c):80"))
	s.audit()
	eventually.True(s, "the connection leaves the flowtable", func() bool { return !s.offloaded(f) })
	if now := s.ask(f); now != "b" {
		s.Errorf("an open connection to b is answered by %q", now)
	}
	s.inTable(f) // b lives on
	if f := s.connect("client", model.TCP, "10.96.0.10:80"); f.backend != "c" {
		s.Errorf("a new connection goes to %s", f.backend)
	}
}

func (s *flowStage) devices() {
	if err := s.bed.RemovePod("client"); err != nil {
		s.Fatal(err)
	}
	s.audit()
	if _, err := s.bed.AddPod(s.Context(), testbed.PodSpec{Name: "later"}); err != nil {
		s.Fatal(err)
	}
	f := s.connect("later", model.TCP, "10.96.0.10:80")
	s.audit()
	s.inTable(f)
	if n := s.seen(f); n > 0 {
		s.Errorf("%d packets of a new pod have passed the hook", n)
	}
	if err := s.bed.RemovePod("later"); err != nil {
		s.Fatal(err)
	}
	eventually.True(s, "the connection of a pod that is gone leaves the flowtable", func() bool { return !s.offloaded(f) })
	s.audit()
	list := s.nft("list table ip fairlead")
	_, list, _ = strings.Cut(list, "devices = {")
	list, _, _ = strings.Cut(list, "}")
	var links []string
	for line := range strings.Lines(s.run("ip", "-o", "link", "show", "up")) {
		name, _, _ := strings.Cut(strings.Fields(line)[1], "@")
		links = append(links, strings.TrimSuffix(name, ":"))
	}
	for name := range strings.SplitSeq(list, ",") {
		name = strings.Trim(strings.TrimSpace(name), `"`)
		if strings.HasPrefix(name, "cali") && !slices.Contains(links, name) {
			s.Errorf("the flowtable has %q, which is gone; there are %s", name, links)
		}
	}
}

// filtered has a policy come that cuts an open connection, and go.
func (s *flowStage) filtered() {
	f := s.connect("client", model.TCP, "10.96.0.10:80")
	s.inTable(f)
	s.nft("add table inet cuts; add chain inet cuts forward { type filter hook forward priority 0; }; " +
		"add rule inet cuts forward tcp dport 9 drop")
	s.audit()
	if list := s.nft("list ruleset"); strings.Contains(list, "flowtable") {
		s.Error("a policy finds a flowtable:\n", list)
	}
	if s.ask(f) != "b" || s.offloaded(f) {
		s.Error("the connection does not live on past the flowtable: ", s.tracked(f))
	}
	s.nft("add rule inet cuts forward counter drop")
	if _, err := f.Write([]byte("?\n")); err != nil {
		s.Fatal(err)
	}
	eventually.True(s, "the policy drops packets of the connection", func() bool {
		return !strings.Contains(s.nft("list table inet cuts"), "counter packets 0 ")
	})
	s.nft("delete table inet cuts")
	s.audit()
	eventually.True(s, "the flowtable is back", func() bool { return s.offloaded(f) }) // the client sends again
	s.nft("add table inet cuts; add chain inet cuts forward { type filter hook forward priority 0; }; " +
		"add table inet translation; add chain inet translation post { type nat hook postrouting priority 0; }; " +
		"add rule inet translation post counter")
	s.audit()
	if list := s.nft("list ruleset"); !strings.Contains(list, "flowtable") {
		s.Error("rules that see no packet of an open connection are taken for a policy:\n", list)
	}
	s.nft("delete table inet cuts; delete table inet translation")
}

// switched has another plane take the place of the one with flowtables.
func (s *flowStage) switched() {
	tcp, udp := s.connect("client", model.TCP, "10.96.0.10:80"), s.connect("client", model.UDP, "10.96.0.10:53")
	s.inTable(tcp)
	s.inTable(udp)
	before := s.plane
	err := s.bed.Do(testbed.Node, func() (err error) {
		s.plane, err = conntrack.Wrap(iptables.New(iptables.Options{Backend: iptables.NFTables}))(dataplane.Config{})
		return err
	})
	if err == nil {
		err = errors.Join(s.plane.Sync(s.Context(), s.state), before.Remove(s.Context()), before.Close())
	}
	if err != nil {
		s.Fatal(err)
	}
	next := s.plane
	s.Cleanup(func() {
		if err := errors.Join(next.Remove(context.WithoutCancel(s.Context())), next.Close()); err != nil {
			s.Error(err)
		}
	})
	for _, f := range []*flow{tcp, udp} {
		eventually.True(s, "the connection leaves the flowtable", func() bool { return !s.offloaded(f) })
		if now := s.ask(f); now != "b" {
			s.Errorf("an open connection to b is answered by %q", now)
		}
	}
	s.must(strings.ReplaceAll(flowRows, "(b):53", "(c):53"))
	if now := s.ask(udp); now != "c" {
		s.Errorf("after b has left the Service, %s answers", now)
	}
}

func (s *flowStage) removed() {
	f := s.connect("client", model.TCP, "10.96.0.10:80")
	s.inTable(f)
	if err := errors.Join(s.plane.Remove(s.Context()), s.plane.Close()); err != nil {
		s.Fatal(err)
	}
	s.plane = nil
	if list := s.nft("list ruleset"); list != "" {
		s.Error("left behind:\n", list)
	}
	eventually.True(s, "the connection leaves the flowtable", func() bool { return !s.offloaded(f) })
}

// restart has another process, which has no flowtables, take over what one with flowtables has left.
func (s *flowStage) restart() {
	f := s.connect("client", model.TCP, "10.96.0.10:80")
	s.inTable(f)
	before := s.nft("-a", "list table ip fairlead")
	if err := s.plane.Close(); err != nil {
		s.Fatal(err)
	}
	s.plane = nil
	s.open(dataplane.NoFlowtable)
	after := s.nft("-a", "list table ip fairlead")
	handle := func(list string) string {
		_, list, _ = strings.Cut(list, "map frontends { # handle ")
		list, _, _ = strings.Cut(list, "\n")
		return list
	}
	if strings.Contains(after, "flowtable") || strings.Contains(after, "chain offload") || handle(before) != handle(after) {
		s.Error("a plane without flowtables leaves:\n", after, "of:\n", before)
	}
	eventually.True(s, "the connection leaves the flowtable", func() bool { return !s.offloaded(f) })
	if s.ask(f) != "b" {
		s.Error("the connection has another backend")
	}
}
