package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// Clients hold a connection each, as those of gRPC do. One of four asks all the time, the others now and then.
const (
	holding          = 120
	rebalanceMinutes = 5
	askOften         = 300 * time.Millisecond
	askSeldom        = 3 * time.Second // and up to three times that
)

// BenchmarkRebalance has clients of HTTP/2 hold connections to three backends when a fourth one comes. It tells for
// each minute how far the backend is from its even share that is furthest, and how many requests have failed.
func BenchmarkRebalance(b *testing.B) {
	program := buildDaemon(b)
	for b.Loop() {
		var all []*holders
		for _, mode := range []string{"ebpf", "iptables", "nftables", "userspace"} {
			all = append(all, newHolders(b, program, mode))
		}
		rows := [][]string{{"mode", "before"}}
		for _, h := range all {
			rows = append(rows, []string{h.mode, h.unevenness()})
			h.write(b, 4)
		}
		for minute := range rebalanceMinutes {
			letPass(time.Minute)
			rows[0] = append(rows[0], fmt.Sprintf("%d min", minute+1))
			for i, h := range all {
				rows[i+1] = append(rows[i+1], h.unevenness())
			}
		}
		rows[0] = append(rows[0], "requests", "failed", "connections made anew")
		for i, h := range all {
			h.end()
			rows[i+1] = append(rows[i+1], fmt.Sprint(h.requests), fmt.Sprint(len(h.failed)), fmt.Sprint(h.dialled-holding))
			for _, err := range h.failed {
				b.Errorf("mode %s: %v", h.mode, err)
			}
		}
		printTable(fmt.Sprintf("%d clients, 3 backends and a new one: the largest distance from the even share", holding), rows...)
	}
}

// holders are clients in a cluster of their own.
type holders struct {
	bed      *testbed.Bed
	mode     string
	manifest string
	end      func() // no request is made any more

	mu                sync.Mutex
	backends          map[int]string // that have answered each client last
	requests, dialled int
	failed            []error
}

func newHolders(b *testing.B, program, mode string) *holders {
	b.Helper()
	spec := testbed.Spec{Cgroup: mode == "ebpf"}
	for i := range 4 {
		spec.Pods = append(spec.Pods, testbed.PodSpec{Name: serverPod(i)})
	}
	h := &holders{
		bed: testbed.Need(b, spec), mode: mode, manifest: filepath.Join(b.TempDir(), "web.yaml"), backends: map[int]string{},
	}
	for i := range 4 {
		h.serve(b, serverPod(i))
	}
	h.write(b, 3)
	d := daemon{bed: h.bed, args: []string{
		program, "run", "--proxy-mode", mode, "--manifests", h.manifest, "--hostname-override", string(testbed.Node),
		"--cluster-cidr", testbed.ClusterCIDRs()[0].String(), "--healthz-bind-address", healthz, "--control-socket", "",
	}}
	if mode == "ebpf" {
		mount := []string{"unshare", "--mount", "sh", "-c", `mount -t bpf bpf /sys/fs/bpf && exec "$0" "$@"`}
		d.args = append(append(mount, d.args...), "--cgroup-root", h.bed.Cgroup())
	}
	if _, err := d.start(context.WithoutCancel(b.Context())); err != nil {
		b.Fatal(err)
	}
	ctx, stop := context.WithCancel(b.Context())
	var group sync.WaitGroup
	h.end = func() { stop(); group.Wait() }
	b.Cleanup(func() {
		h.end()
		if err := d.stop(); err != nil {
			b.Error(err)
		}
	})
	seed := sample.Seed(b)
	for i := range holding {
		chance := rand.New(rand.NewPCG(seed, uint64(i)))
		group.Go(func() { h.hold(ctx, i, chance) })
	}
	for start := time.Now(); time.Since(start) < 4*askSeldom; letPass(time.Second) {
		if h.answered() == holding {
			return h
		}
	}
	b.Fatalf("mode %s: %d of %d clients got an answer: %v", mode, h.answered(), holding, h.failed)
	return nil
}

// write replaces the manifest by one in which the Service has so many backends.
func (h *holders) write(b *testing.B, backends int) {
	b.Helper()
	text := "kind: Service\napiVersion: v1\nmetadata: {name: web, namespace: default, annotations: {fairlead.dev/rebalance: 2s}}\n" +
		"spec: {clusterIP: 10.96.0.10, ports: [{port: 80}]}\n---\n" +
		"kind: EndpointSlice\napiVersion: discovery.k8s.io/v1\naddressType: IPv4\nports: [{name: \"\", port: 8080}]\n" +
		"metadata: {name: web-1, namespace: default, labels: {kubernetes.io/service-name: web}}\nendpoints:\n"
	for i := range backends {
		text += fmt.Sprintf("- addresses: [%s]\n", h.bed.Addr(testbed.Place(serverPod(i)), false))
	}
	if err := errors.Join(os.WriteFile(h.manifest+".new", []byte(text), 0o644), os.Rename(h.manifest+".new", h.manifest)); err != nil {
		b.Fatal(err)
	}
}

// serve has a pod answer with its name.
func (h *holders) serve(b *testing.B, pod string) {
	b.Helper()
	var listener net.Listener
	err := h.bed.Do(testbed.Place(pod), func() (err error) {
		listener, err = net.Listen("tcp4", ":8080")
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	name := func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, pod) }
	server := &http.Server{Handler: http.HandlerFunc(name), Protocols: onlyHTTP2(), ReadHeaderTimeout: time.Minute}
	go func() { _ = server.Serve(listener) }()
	b.Cleanup(func() { _ = server.Close() })
}

// onlyHTTP2 is HTTP/2 without TLS.
func onlyHTTP2() *http.Protocols {
	var p http.Protocols
	p.SetUnencryptedHTTP2(true)
	return &p
}

// hold asks until ctx ends. The client connects again when it has no connection, and makes no request twice.
func (h *holders) hold(ctx context.Context, me int, chance *rand.Rand) {
	transport := &http.Transport{
		Protocols: onlyHTTP2(),
		DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
			h.mu.Lock()
			h.dialled++
			h.mu.Unlock()
			return h.bed.Dial(ctx, testbed.Node, model.TCP, netip.MustParseAddrPort(address))
		},
	}
	defer transport.CloseIdleConnections()
	client := http.Client{Transport: transport, Timeout: 10 * time.Second}
	for ctx.Err() == nil {
		backend, err := ask(ctx, &client)
		h.mu.Lock()
		if ctx.Err() == nil {
			h.requests++
		}
		if err == nil {
			h.backends[me] = backend
		} else if ctx.Err() == nil {
			h.failed = append(h.failed, fmt.Errorf("client %d: %w", me, err))
		}
		h.mu.Unlock()
		pause := askOften
		if me%4 > 0 {
			pause = askSeldom + time.Duration(chance.Int64N(int64(2*askSeldom)))
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause): //nolint:forbidigo // the pace of clients
		}
	}
}

func ask(ctx context.Context, client *http.Client) (backend string, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://10.96.0.10:80/", strings.NewReader("question"))
	if err != nil {
		return "", err
	}
	request.GetBody = nil // the client could send it again
	answer, err := client.Do(request)
	if err != nil {
		return "", err
	}
	defer answer.Body.Close()
	name, err := io.ReadAll(answer.Body)
	return string(name), err
}

func (h *holders) answered() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.backends)
}

// unevenness is how far the backend is from its even share that is furthest. Which backends there are the clients know.
func (h *holders) unevenness() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	counts := map[string]float64{}
	for _, backend := range h.backends {
		counts[backend]++
	}
	share, worst := float64(holding)/float64(len(counts)), 0.0
	for _, n := range counts {
		worst = max(worst, math.Abs(n/share-1))
	}
	return fmt.Sprintf("%.0f %% of %d", 100*worst, len(counts))
}
