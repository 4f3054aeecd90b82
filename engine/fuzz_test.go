package engine

import (
	"bufio"
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/memory"
	"fairlead.dev/fairlead/lab/allocs"
	"fairlead.dev/fairlead/service"
)

// FuzzControl sends arbitrary requests to the control socket's server: no panic, bounded memory, no other failure than
// that of the asker, and the rows stay as they are.
func FuzzControl(f *testing.F) {
	for _, question := range []string{
		"/dump?format=json", "/counters", "/status", "/audit", "/nothing", "/explain?destination=10.96.0.1:80&interface=eth0",
		"/explain?source=fd00::1%25eth0&destination=[fd00::a60:1]:80&protocol=sctp", "/explain?source=x",
	} {
		f.Add("GET " + question + " HTTP/1.1\r\nHost: fairlead\r\n\r\n")
	}
	f.Add("POST /dump HTTP/1.1\r\nHost: fairlead\r\nContent-Length: 4\r\n\r\na=%z")
	e, rows := running(f)
	want := rows()
	handler := e.newControl("").http.Handler()
	f.Fuzz(func(t *testing.T, text string) {
		r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(text)))
		if err != nil {
			return
		}
		w := httptest.NewRecorder()
		allocs.Bound(t, len(text), func() { handler.ServeHTTP(w, r.WithContext(t.Context())) })
		ask := r.Method == http.MethodGet || r.Method == http.MethodHead
		unasked := strings.HasPrefix(r.URL.Path, "/counters") // this plane counts nothing
		if w.Code >= 500 && !unasked || w.Code < 300 && !ask {
			t.Errorf("%s %s is answered by %d: %s", r.Method, r.URL, w.Code, w.Body)
		}
		if got := rows(); got != want {
			t.Errorf("%s %s changes the rows to\n%s", r.Method, r.URL, got)
		}
	})
}

// running is an Engine that serves a Service, and what tells its rows.
func running(f *testing.F) (e *Engine, rows func() string) {
	table, err := service.NewTable(service.Options{NodeName: "node"})
	if err != nil {
		f.Fatal(err)
	}
	plane, err := (&memory.Kernel{}).New(dataplane.Config{})
	if err != nil {
		f.Fatal(err)
	}
	source := script{make(chan service.Batch, 1), make(chan error)}
	source.batches <- web(1, "10.244.1.2")
	e = New(Options{Source: source, Table: table, Plane: plane, Log: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- e.Run(ctx) }()
	f.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			f.Error(err)
		}
	})
	return e, func() (text string) {
		err := e.Do(ctx, func(_ context.Context, v View) error {
			text = v.State.String()
			return nil
		})
		if err != nil {
			f.Fatal(err)
		}
		return text
	}
}
