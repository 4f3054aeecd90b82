package conformance_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/ipvs"
	"fairlead.dev/fairlead/lab/conformance"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/model"
)

// naive is what kube-proxy of an older kernel may have left: a connection from a port that was used before goes
// where the earlier one went, be that gone.
func naive() map[string]string {
	return map[string]string{"conn_reuse_mode": "0", "expire_nodest_conn": "0"}
}

// TestIPVS_rollingUpdate replaces the backends of a Service one by one, again and again, while a client makes short
// connections from few source ports. IPVS still remembers the earlier connections from these. With naive settings it
// takes new ones to the backends of the earlier ones; the plane's settings lose none. On Linux 5.16 and later either of
// the two settings is enough, so other tests cover each alone. TestIPVS_portsUsedAgain needs conn_reuse_mode, "goes
// when its time is over" of TestIPVS_drain needs expire_nodest_conn.
func TestIPVS_rollingUpdate(t *testing.T) {
	if !hasIPVS(t) {
		vm.Replay(t, "IPVS")
		return
	}
	for _, way := range []rolling{
		{}, {deleted: true}, {fin: true}, {deleted: true, fin: true}, {v6: true}, {deleted: true, fin: true, v6: true},
	} {
		if lost := way.roll(t, naive(), 500); lost == "" {
			t.Errorf("%+v: no connection is lost with naive settings, so that the test proves nothing", way)
		}
		n := 2000
		if way == (rolling{}) {
			n = 10_000
		}
		if lost := way.roll(t, nil, n); lost != "" {
			t.Errorf("%+v: %s", way, lost)
		}
	}
}

// TestIPVS_portsUsedAgain connects from one port all the time. Each connection is a new one, and both backends get
// some of them, unless IPVS is set to remember.
func TestIPVS_portsUsedAgain(t *testing.T) {
	if !hasIPVS(t) {
		vm.Replay(t, "IPVS")
		return
	}
	for want, sysctls := range map[int]map[string]string{2: nil, 1: {"conn_reuse_mode": "0"}} {
		r := rolling{fin: true}.begin(t, sysctls)
		seen := map[string]bool{}
		for range 20 {
			answer, err := r.connect(20000)
			if err != nil {
				t.Fatal(err)
			}
			name, _, _ := strings.Cut(answer, " ")
			seen[name] = true
		}
		if len(seen) != want {
			t.Errorf("with %v: %d backends instead of %d", sysctls, len(seen), want)
		}
	}
}

// roll makes up to n connections, and changes the backends after every twentieth. It returns the result of the first
// one that no backend in service has answered.
func (w rolling) roll(t *testing.T, sysctls map[string]string, n int) (lost string) {
	r := w.begin(t, sysctls)
	for i := range n {
		if i%20 == 19 {
			if err := r.next(t.Context(), i/20); err != nil {
				t.Fatal(err)
			}
		}
		answer, err := r.connect(20000 + i%10)
		if name, _, _ := strings.Cut(answer, " "); err != nil || !slices.Contains(r.serving, name) {
			return fmt.Sprintf("connection %d: answer %q, %v; %s serve", i, answer, err, r.serving)
		}
	}
	return ""
}

// rolling is a way to update.
type rolling struct {
	deleted bool // backends that leave are deleted at once, otherwise they drain
	fin     bool // connections end with FIN, as they mostly do, otherwise with RST
	v6      bool
}

type rollout struct {
	rolling
	bed     *testbed.Bed
	plane   dataplane.Dataplane
	state   *model.State
	serving []string // names of pods
}

// begin has a plane find naive settings, and sets some of IPVS when it has set its own.
func (w rolling) begin(t *testing.T, sysctls map[string]string) *rollout {
	bed, err := conformance.NewBed(t.Context(), false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = bed.Close() })
	r := &rollout{rolling: w, bed: bed}
	if r.state, err = r.rows(0); err != nil {
		t.Fatal(err)
	}
	if err := bed.Do(testbed.Node, func() error { return r.start(t.Context(), sysctls) }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.plane.Close() })
	return r
}

func (r *rollout) start(ctx context.Context, sysctls map[string]string) (err error) {
	if err := set(naive()); err != nil {
		return err
	}
	if r.plane, err = ipvs.New(r.options())(dataplane.Config{}); err != nil {
		return err
	}
	return errors.Join(r.plane.Sync(ctx, r.state), set(sysctls))
}

func set(sysctls map[string]string) error {
	for name, value := range sysctls {
		if err := os.WriteFile("/proc/sys/net/ipv4/vs/"+name, []byte(value), 0); err != nil {
			return err
		}
	}
	return nil
}

// rows are those of the n-th stage: two of four pods serve, and a third one drains in every other stage.
func (r *rollout) rows(n int) (*model.State, error) {
	pods := []struct{ name, addr string }{
		{"pod-a", "10.244.1.11:8080"}, {"pod-b", "10.244.1.12:8080"},
		{"pod-c", "10.244.2.13:8080"}, {"pod-d", "10.244.2.14:8080"},
	}
	text := "frontend 10.96.0.10:80/tcp any forward default/web:http cluster snat never\nguard 10.96.0.0/16 drop\n"
	r.serving = nil
	for i := range 2 {
		pod := pods[(n/2+i+1)%len(pods)]
		r.serving = append(r.serving, pod.name)
		text += fmt.Sprintf("backend default/web:http cluster %s\n", pod.addr)
	}
	if n%2 == 0 && !r.deleted {
		text += fmt.Sprintf("backend default/web:http cluster %s weight 0\n", pods[n/2%len(pods)].addr)
	}
	return model.ParseState(r.text(text))
}

func (r *rollout) next(ctx context.Context, n int) error {
	next, err := r.rows(n)
	if err != nil {
		return err
	}
	change := model.Diff(r.state, next)
	r.state = next
	return r.plane.Apply(ctx, next, change)
}

func (w rolling) options() ipvs.Options {
	if w.deleted {
		return ipvs.Options{DrainTimeout: time.Nanosecond}
	}
	return ipvs.Options{}
}

// connect asks from a source port, and leaves nothing of the connection at the client, so that the port can be used
// again at once.
func (r *rollout) connect(port int) (answer string, err error) {
	family, from, to := r.addresses(port)
	err = r.bed.Do("client", func() error {
		// Without sockets in the state TIME_WAIT.
		if err := os.WriteFile("/proc/sys/net/ipv4/tcp_max_tw_buckets", []byte("0"), 0); err != nil {
			return err
		}
		fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		limit := unix.Timeval{Usec: 900_000} // less than it takes to send a SYN that was lost again
		patience := unix.NsecToTimeval(eventually.Patience().Nanoseconds())
		for _, err := range []error{
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1),
			unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}),
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &patience),
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit),
			unix.Bind(fd, from),
			uninterrupted(func() error { return unix.Connect(fd, to) }),
		} {
			if err != nil {
				return err
			}
		}
		line := make([]byte, 64)
		n, err := readWhole(fd, line)
		answer = strings.TrimSpace(string(line[:max(n, 0)]))
		if err != nil || !r.fin {
			return err
		}
		return finish(fd)
	})
	return answer, err
}

// uninterrupted repeats a call that a signal of the Go runtime interrupts. The kernel repeats none that has a time limit.
func uninterrupted(call func() error) (err error) {
	for err = unix.EINTR; errors.Is(err, unix.EINTR); {
		err = call()
	}
	return err
}

func readWhole(fd int, b []byte) (n int, err error) {
	err = uninterrupted(func() (err error) {
		n, err = unix.Read(fd, b)
		return err
	})
	return n, err
}

// finish closes both directions: the server closes its own when it has seen the end of the client's.
func finish(fd int) error {
	if err := unix.Shutdown(fd, unix.SHUT_WR); err != nil {
		return err
	}
	n, err := readWhole(fd, make([]byte, 64))
	if n > 0 {
		return fmt.Errorf("%d more bytes instead of the end", n)
	}
	return err
}

func (w rolling) text(ipv4 string) string {
	if w.v6 {
		return conformance.EmbedText(ipv4)
	}
	return ipv4
}

func (w rolling) addresses(port int) (family int, from, to unix.Sockaddr) {
	client, service := netip.MustParseAddrPort(w.text("10.244.1.20:0")), netip.MustParseAddrPort(w.text("10.96.0.10:80"))
	if w.v6 {
		return unix.AF_INET6, &unix.SockaddrInet6{Port: port, Addr: client.Addr().As16()},
			&unix.SockaddrInet6{Port: int(service.Port()), Addr: service.Addr().As16()}
	}
	return unix.AF_INET, &unix.SockaddrInet4{Port: port, Addr: client.Addr().As4()},
		&unix.SockaddrInet4{Port: int(service.Port()), Addr: service.Addr().As4()}
}
