package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"regexp"
	"testing"

	"fairlead.dev/fairlead/httpserve"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// slow are clients of one address that do what keeps a server waiting.
type slow struct {
	w     *world
	conns []net.Conn
}

// connect opens n connections to each address, and sends on them, one after the other, what each text says.
func (s *slow) connect(n int, to []netip.AddrPort, texts ...string) {
	s.w.Helper()
	for i := range n {
		for _, at := range to {
			c, err := s.w.bed.Dial(s.w.Context(), testbed.Outside, model.TCP, at)
			if err != nil {
				s.w.Fatal(err)
			}
			s.conns = append(s.conns, c)
			_, _ = io.WriteString(c, texts[i%len(texts)])
		}
	}
}

// drip sends one byte more of everything.
func (s *slow) drip() {
	for _, c := range s.conns {
		_, _ = io.WriteString(c, "a")
	}
}

func (s *slow) close() {
	for _, c := range s.conns {
		_ = c.Close()
	}
}

// files is how many files the process has open.
func (p *proxy) files() int {
	open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.Process.Pid))
	if err != nil {
		p.w.Fatal(err)
	}
	return len(open)
}

// checked is a Service whose health load balancers ask for.
const checked = `
apiVersion: v1
kind: Service
metadata: {name: checked}
spec:
  type: LoadBalancer
  externalTrafficPolicy: Local
  healthCheckNodePort: 32123
  clusterIP: 10.96.0.11
  clusterIPs: [10.96.0.11]
  ports: [{port: 80, targetPort: 8080, nodePort: 30081}]
`

// TestRun_slowClients: 300 clients of one address that send headers byte by byte, no body, or nothing hold few of the
// process's files, and those not for long. Other clients, and those of the same address, are answered all the while.
func TestRun_slowClients(t *testing.T) {
	w := newWorld(t)
	w.write("checked.yaml", checked)
	p := w.start("--healthz-bind-address", "0.0.0.0:10256", "--metrics-bind-address", "0.0.0.0:10249")
	healthz, metrics := netip.MustParseAddrPort("192.0.2.1:10256"), netip.MustParseAddrPort("192.0.2.1:10249")
	row := netip.MustParseAddrPort("192.0.2.1:32123") // of a Service without endpoints
	probe := func(from testbed.Place) {
		t.Helper()
		for url, want := range map[string]int{
			healthz.String() + "/livez": http.StatusOK, row.String(): http.StatusServiceUnavailable,
			metrics.String() + "/healthz": http.StatusOK,
		} {
			response, err := w.bed.HTTPClient(from).Get("http://" + url)
			if err != nil {
				t.Error(err)
				continue
			}
			_ = response.Body.Close()
			if response.StatusCode != want {
				t.Errorf("%s answers %d", url, response.StatusCode)
			}
		}
	}
	eventually.True(t, "health checks are answered", func() bool {
		return w.get(row, "/") == http.StatusServiceUnavailable && w.get(metrics, "/healthz") == http.StatusOK
	})
	before := p.files()

	clients := slow{w: w}
	defer clients.close()
	const get = "GET /livez HTTP/1.1\r\nHost: a\r\n"
	clients.connect(100, []netip.AddrPort{healthz, row, metrics}, "", get+"A: ", get+"Content-Length: 1000000\r\n\r\n")
	probe(testbed.NodeB)
	clients.drip()
	probe(testbed.Outside)
	bound := httpserve.Health().Source + httpserve.Metrics().Source
	const beside = 8 // for the process's own work, and the probes' connections
	if n := p.files() - before; n > bound+beside {
		t.Errorf("%d more files are open, want at most %d", n, bound+beside)
	}
	closed := regexp.MustCompile(`fairlead_http_closed_connections_total{listener="health",reason="source"} [1-9]`)
	if _, text := w.page(metrics, "/metrics"); !closed.MatchString(text) {
		t.Error("/metrics does not say that connections were closed")
	}
	eventually.True(t, "the connections are closed", func() bool {
		clients.drip()
		probe(testbed.NodeB)
		return p.files() <= before
	})
}
