package ebpf_test

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// loaded is a Service whose connections go to the less loaded of two backends. Tests open connections and end them.
type loaded struct {
	cluster
	plane dataplane.Dataplane
	state *model.State
	from  testbed.Place
	to    netip.AddrPort
	conns map[string][]net.Conn // by the pod
}

// eachLoaded has a test open connections by sockets of a pod, and as packets from outside, in both families.
func eachLoaded(t *testing.T, test func(l *loaded)) {
	for name, c := range map[string]struct {
		from testbed.Place
		to   string
	}{
		"sockets":       {"client", "10.96.0.10:80"},
		"sockets, IPv6": {"client", "[fd00::a60:a]:80"},
		"packets":       {testbed.Outside, "192.0.2.1:30080"},
	} {
		t.Run(name, func(t *testing.T) {
			l := &loaded{cluster: newCluster(t), from: c.from, to: netip.MustParseAddrPort(c.to), conns: map[string][]net.Conn{}}
			l.plane = l.openAs(ebpf.Options{})
			defer func() {
				l.end("pod-a", "pod-b", "pod-c")
				check(t, l.plane.Close())
			}()
			test(l)
		})
	}
}

// serve gives pods weights, as "pod-a=1 pod-b=2".
func (l *loaded) serve(pods string) {
	l.t.Helper()
	rows := `
frontend 10.96.0.10:80/tcp any forward default/web:http cluster snat offcluster
frontend [fd00::a60:a]:80/tcp any forward default/web:http cluster6 snat offcluster
frontend 192.0.2.1:30080/tcp any forward default/web:http cluster snat always
pool default/web:http cluster scheduler twos
pool default/web:http cluster6 scheduler twos
pods 10.244.0.0/16
pods fd00::af4:0/112
`
	for pod := range strings.FieldsSeq(pods) {
		name, weight, _ := strings.Cut(pod, "=")
		rows += fmt.Sprintf("backend default/web:http cluster %s:8080 weight %s\n", l.Addr(testbed.Place(name), false), weight)
		rows += fmt.Sprintf("backend default/web:http cluster6 [%s]:8080 weight %s\n", l.Addr(testbed.Place(name), true), weight)
	}
	before := l.state
	l.state = parse(l.t, rows)
	if before == nil {
		check(l.t, l.plane.Sync(l.t.Context(), l.state))
	} else {
		check(l.t, l.plane.Apply(l.t.Context(), l.state, model.Diff(before, l.state)))
	}
	l.audited(l.plane, l.state)
}

// connect opens connections that stay, and returns how many each pod has got.
func (l *loaded) connect(n int) map[string]int {
	l.t.Helper()
	got := map[string]int{}
	for range n {
		conn, err := l.Dial(l.t.Context(), l.from, model.TCP, l.to)
		check(l.t, err)
		line, err := bufio.NewReader(conn).ReadString('\n')
		check(l.t, err)
		pod, _, _ := strings.Cut(line, " ")
		got[pod]++
		l.conns[pod] = append(l.conns[pod], conn)
	}
	return got
}

// end ends all connections to some pods.
func (l *loaded) end(pods ...string) {
	l.t.Helper()
	for _, pod := range pods {
		for _, conn := range l.conns[pod] {
			check(l.t, conn.Close())
		}
		delete(l.conns, pod)
	}
}

// avoids expects that a pod which has most connections gets none, and others about as many as each other.
func (l *loaded) avoids(pod string, n int) {
	l.t.Helper()
	got := l.connect(n)
	for _, other := range []string{"pod-a", "pod-b", "pod-c"} {
		if least := n/2 - 7; other != pod && got[other] < least { // less is as probable as one in 10,000
			l.t.Errorf("%s gets %d of %d connections", other, got[other], n)
		}
	}
	if got[pod] > 0 {
		l.t.Errorf("%s has most connections, and gets %d of %d", pod, got[pod], n)
	}
}

// regains expects that a pod gets connections again once its own have ended.
func (l *loaded) regains(pod string) {
	l.t.Helper()
	l.end(pod)
	eventually.Nil(l.t, "a connection for "+pod, func() error {
		if l.connect(1)[pod] == 0 {
			return errors.New("another one gets it")
		}
		return nil
	})
	if got := l.connect(24); got[pod] < 6 { // two in three of them, of which less is as probable as one in 10,000
		l.t.Errorf("%s has fewest connections, and gets %d of 24", pod, got[pod])
	}
}

// A backend that has many open connections gets none of the others, until these end. Backends that have none share them.
func TestLoads(t *testing.T) {
	eachLoaded(t, func(l *loaded) {
		l.serve("pod-a=1")
		l.connect(60)
		l.serve("pod-a=1 pod-b=1 pod-c=1")
		l.avoids("pod-a", 40)
		l.regains("pod-a")
	})
}

// A backend gets as many connections as its weight is of the others'.
func TestLoads_weights(t *testing.T) {
	eachLoaded(t, func(l *loaded) {
		l.serve("pod-a=3 pod-b=1")
		if got := l.connect(40); got["pod-a"] < 29 || got["pod-a"] > 31 {
			l.t.Errorf("of weights 3 and 1, %v", got)
		}
		l.serve("pod-a=1 pod-b=1")
		if got := l.connect(18); got["pod-b"] != 18 {
			l.t.Errorf("pod-a has 20 more, and of 18 connections %v", got)
		}
	})
}

// A backend that drains, or leaves, and comes back has the connections that it had, and so it has for another process.
func TestLoads_drains(t *testing.T) {
	eachLoaded(t, func(l *loaded) {
		l.serve("pod-a=1")
		l.connect(100)
		l.serve("pod-a=0 pod-b=1 pod-c=1")
		l.avoids("pod-a", 20)
		l.serve("pod-a=1 pod-b=1 pod-c=1")
		l.avoids("pod-a", 20)
		l.serve("pod-b=1 pod-c=1")
		l.serve("pod-a=1 pod-b=1 pod-c=1")
		l.avoids("pod-a", 20)
		check(l.t, l.plane.Close())
		l.plane = l.open()
		check(l.t, l.plane.Sync(l.t.Context(), l.state))
		l.audited(l.plane, l.state)
		l.avoids("pod-a", 20)
		l.regains("pod-a")
	})
}

// Loads that are wrong, as another version's process leaves them, become right.
func TestLoads_corrected(t *testing.T) {
	eachLoaded(t, func(l *loaded) {
		l.serve("pod-a=1")
		l.connect(60)
		l.serve("pod-a=1 pod-b=1 pod-c=1")
		m := l.openMemory("loads")
		defer m.Close()
		for key, load, all := make([]byte, m.KeySize()), make([]byte, m.ValueSize()), m.Iterate(); all.Next(&key, &load); {
			check(l.t, m.Delete(key))
		}
		for range 3 {
			check(l.t, ebpf.LookAtLoads(l.plane, l.state))
		}
		l.avoids("pod-a", 40)
		l.regains("pod-a")
	})
}
