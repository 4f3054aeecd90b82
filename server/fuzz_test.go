package server

import (
	"bufio"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/allocs"
)

// FuzzRequests sends arbitrary requests to the server for operators, without its profiles, which take their time: no
// panic, bounded memory, and no failure of the server.
func FuzzRequests(f *testing.F) {
	for _, head := range []string{
		"GET /statusz HTTP/1.1\r\nAccept: application/json;as=Statusz;v=v1beta1;g=config.k8s.io, text/*;q=0.1",
		"GET /flagz HTTP/1.1\r\nAccept: application/yaml;as=Flagz;v=v1alpha1;g=config.k8s.io",
		"GET /statusz HTTP/1.1\r\nAccept: application/yaml", "PUT /debug/flags/v HTTP/1.1\r\nContent-Length: 1",
		"GET /configz HTTP/1.1", "GET /healthz?verbose HTTP/1.1", "GET /metrics/slis HTTP/1.1", "GET /debug/flags HTTP/1.1",
	} {
		f.Add(head + "\r\nHost: fairlead\r\n\r\n4")
	}
	yes := func() bool { return true }
	h := newHandler(Options{
		Metrics: http.NotFoundHandler(), Mode: func() string { return "nftables" }, Version: "0.1.0",
		Config:    func() map[string]any { return map[string]any{"kubeproxy.config.k8s.io": map[string]string{}} },
		Flags:     func() map[string]string { return map[string]string{"proxy-mode": "nftables"} },
		Profiling: yes, Flagz: yes, Statusz: yes,
		Verbosity: func(string) error { return nil },
	})
	f.Fuzz(func(t *testing.T, text string) {
		r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(text)))
		if err != nil || strings.HasPrefix(r.URL.Path, "/debug/pprof") {
			return
		}
		w := httptest.NewRecorder()
		allocs.Bound(t, len(text), func() { h.ServeHTTP(w, r) })
		if w.Code >= 500 {
			t.Errorf("%q is answered by %d: %s", text, w.Code, w.Body)
		}
	})
}
