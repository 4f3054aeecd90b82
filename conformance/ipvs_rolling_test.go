package conformance_test

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/conformance"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/ipvs"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/testbed"
	"fairlead.dev/fairlead/testbed/vm"
)

// TestIPVS_rollingUpdate replaces the backends of a Service one by one, again and again, while a client makes
// short connections from few source ports. IPVS still remembers the earlier connections from these. As the
// kernel is set where nobody cares, it takes new ones to where the earlier ones went; the plane's settings
// lose none.
func TestIPVS_rollingUpdate(t *testing.T) {
	if !hasIPVS(t) {
		vm.Replay(t, "IPVS")
		return
	}
	naive := map[string]string{"conn_reuse_mode": "0", "expire_nodest_conn": "0"}
	if lost := roll(t, naive, 500); len(lost) == 0 {
		t.Error("no connection is lost with naive settings, so that the test proves nothing")
	}
	if lost := roll(t, nil, 10_000); len(lost) > 0 {
		t.Errorf("%d connections are lost, the first is %s", len(lost), lost[0])
	}
}

// roll makes n connections, with a change of the backends after every twentieth, and returns what
// became of those that were not answered by a backend in service.
func roll(t *testing.T, sysctls map[string]string, n int) (lost []string) {
	bed, err := conformance.NewBed(t.Context(), false)
	if err != nil {
		t.Fatal(err)
	}
	defer bed.Close()
	r := rollout{bed: bed, state: model.NewState()}
	if err := r.begin(t.Context(), sysctls); err != nil {
		t.Fatal(err)
	}
	defer r.plane.Close()
	for i := range n {
		if i%20 == 19 {
			if err := r.next(t.Context(), i/20); err != nil {
				t.Fatal(err)
			}
		}
		answer, err := r.connect(20000 + i%10)
		if name, _, _ := strings.Cut(answer, " "); err != nil || !slices.Contains(r.serving, name) {
			lost = append(lost, fmt.Sprintf("connection %d: answer %q, %v; %s serve", i, answer, err, r.serving))
		}
	}
	return lost
}

type rollout struct {
	bed     *testbed.Bed
	plane   dataplane.Dataplane
	state   *model.State
	serving []string // names of pods
}

func (r *rollout) begin(ctx context.Context, sysctls map[string]string) error {
	first, err := r.rows(0)
	if err != nil {
		return err
	}
	r.state = first
	return r.bed.Do(testbed.Node, func() error {
		if r.plane, err = ipvs.New(ipvs.Options{})(dataplane.Config{}); err != nil {
			return err
		}
		if err := r.plane.Sync(ctx, first); err != nil {
			return err
		}
		for name, value := range sysctls {
			if err := os.WriteFile("/proc/sys/net/ipv4/vs/"+name, []byte(value), 0); err != nil {
				return err
			}
		}
		return nil
	})
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
	if n%2 == 0 {
		text += fmt.Sprintf("backend default/web:http cluster %s weight 0\n", pods[n/2%len(pods)].addr)
	}
	return model.ParseState(text)
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

// connect asks from a source port, and aborts the connection, so that the port can be used again at once.
func (r *rollout) connect(port int) (answer string, err error) {
	err = r.bed.Do("client", func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		limit := unix.Timeval{Usec: 900_000} // less than it takes to send a packet that was lost again
		for _, err := range []error{
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1),
			unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}),
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit),
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit),
			unix.Bind(fd, &unix.SockaddrInet4{Port: port, Addr: [4]byte{10, 244, 1, 20}}),
			unix.Connect(fd, &unix.SockaddrInet4{Port: 80, Addr: [4]byte{10, 96, 0, 10}}),
		} {
			if err != nil {
				return err
			}
		}
		line := make([]byte, 64)
		n, err := unix.Read(fd, line)
		answer = strings.TrimSpace(string(line[:max(n, 0)]))
		return err
	})
	return answer, err
}
