package ui

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/recorder"
	"fairlead.dev/fairlead/service"
)

// fake is an agent that tells of Services.
type fake struct {
	mu       sync.Mutex
	absent   bool
	asked    int // about all Services
	services map[string]engine.ServiceReport
	alarms   []string
	events   []recorder.Event
}

// of makes an agent with a Service of two endpoints.
func of(names ...string) *fake {
	f := &fake{services: map[string]engine.ServiceReport{}}
	for _, name := range names {
		f.services[name] = made(name)
	}
	return f
}

func made(name string) engine.ServiceReport {
	return engine.ServiceReport{Summary: service.Summary{Service: name, Ports: []service.PortSummary{{
		Name: "http", Port: "80/tcp", Ready: 1, Draining: 1, Addresses: []service.AddressSummary{{At: "10.96.0.10:80", Kind: "ClusterIP", Verdict: "forward"}},
		Endpoints: []service.EndpointState{
			{At: "10.244.0.1:8080", State: service.Ready, Weight: 100, Counted: service.Counted{Connections: 30}},
			{At: "10.244.0.2:8080", State: service.Draining, Reason: "is terminating"},
		},
		Counted: service.Counted{Connections: 40},
	}}}, LastChange: engine.LastChange{Changed: time.Now().Add(-time.Hour)}}
}

func (f *fake) Ask(_ context.Context, question string) ([]byte, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.absent {
		return nil, errors.New("no proxy listens on /run/x")
	}
	u, err := url.Parse(question)
	if err != nil {
		return nil, err
	}
	switch u.Path {
	case "/status":
		r := engine.Report{Now: time.Now(), Healthy: true, Status: engine.Status{NodeEligible: true}}
		r.Node, r.Mode, r.Plane = "worker-3", "nftables", "nftables"
		for _, text := range f.alarms {
			r.Problems = append(r.Problems, service.Problem{Reason: text})
		}
		return json.Marshal(r)
	case "/events":
		var text []byte
		for _, e := range f.events {
			line, _ := json.Marshal(e)
			text = append(append(text, line...), '\n')
		}
		return text, nil
	}
	name := u.Query().Get("namespace") + "/" + u.Query().Get("name")
	all := engine.Services{Now: time.Now(), Counts: true}
	if name == "/" {
		f.asked++
	}
	for _, s := range f.services {
		if name == "/" {
			s.Ports = slices.Clone(s.Ports)
			for i := range s.Ports {
				s.Ports[i].Endpoints = nil
			}
		}
		if name == "/" || s.Service == name {
			all.Services = append(all.Services, s)
		}
	}
	return json.Marshal(all)
}

// change lets a test change what the agent tells.
func (f *fake) change(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fake) edit(name string, edit func(s *engine.ServiceReport, p *service.PortSummary)) {
	f.change(func() {
		s := f.services[name]
		s.Ports = slices.Clone(s.Ports)
		edit(&s, &s.Ports[0])
		f.services[name] = s
	})
}

func (f *fake) handler(host string) http.Handler {
	return Handler(f.Ask, host)
}

// TestHandler_names has the page asked for by names that lead to this machine, and by those that another site may have.
func TestHandler_names(t *testing.T) {
	for _, c := range []struct {
		host, asked string
		want        int
	}{
		{"127.0.0.1", "127.0.0.1:10247", 200}, {"127.0.0.1", "localhost:8080", 200}, {"127.0.0.1", "[::1]:10247", 200},
		{"127.0.0.1", "LOCALHOST", 200}, {"127.0.0.1", "evil.example:10247", 403}, {"127.0.0.1", "192.0.2.1:10247", 403},
		{"127.0.0.1", "localhost.evil.example", 403}, {"127.0.0.1", "127.0.0.1.evil.example:10247", 403},
		{"192.0.2.1", "192.0.2.1:10247", 200}, {"192.0.2.1", "192.0.2.2:10247", 403}, {"node-3", "node-3:10247", 200},
		{"", "192.0.2.1:10247", 200}, {"", "evil.example", 403}, {"0.0.0.0", "[2001:db8::1]:10247", 200},
		{"::", "evil.example:80", 403}, {"", "", 403}, {"127.0.0.1", "", 403},
	} {
		for _, path := range []string{"/", "/page.js", "/page.css", "/state"} {
			r := httptest.NewRequest(http.MethodGet, path, nil)
			r.Host = c.asked
			w := httptest.NewRecorder()
			of("shop/cart").handler(c.host).ServeHTTP(w, r)
			if w.Code != c.want || c.want != 200 && strings.Contains(w.Body.String(), "cart") {
				t.Errorf("%s of %q at %q: status %d, want %d", path, c.asked, c.host, w.Code, c.want)
			}
			policy := w.Header().Get("Content-Security-Policy")
			if !strings.HasPrefix(policy, "default-src 'none'; script-src 'self';") || strings.Contains(policy, "unsafe") ||
				w.Header().Get("Set-Cookie") != "" {
				t.Errorf("%s: headers %v", path, w.Header())
			}
		}
	}
}

// TestHandler_readOnly has no request change or find more than the page.
func TestHandler_readOnly(t *testing.T) {
	f := of("shop/cart")
	for _, method := range []string{http.MethodPost, http.MethodPut, http.MethodDelete, http.MethodOptions} {
		for _, path := range []string{"/", "/page.js", "/state", "/switch"} {
			w := httptest.NewRecorder()
			f.handler("").ServeHTTP(w, httptest.NewRequest(method, "http://127.0.0.1"+path, nil))
			if w.Code != http.StatusMethodNotAllowed {
				t.Errorf("%s %s: status %d", method, path, w.Code)
			}
		}
	}
	if f.asked > 0 {
		t.Errorf("the agent was asked %d times", f.asked)
	}
}

// get is what a browser gets.
func get(t *testing.T, h http.Handler, query string) (a state) {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "http://localhost/state?"+query, nil))
	if err := json.Unmarshal(w.Body.Bytes(), &a); err != nil || w.Code != 200 {
		t.Fatalf("%s: status %d, %v", query, w.Code, err)
	}
	return a
}

func names(a state) (names []string) {
	for _, r := range a.Rows {
		names = append(names, r.Service)
	}
	return names
}

// TestState_order puts what is wrong first, then what has most connections.
func TestState_order(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := of("a/quiet", "b/busy", "c/empty", "d/problem", "e/ignored", "f/fails")
		f.edit("c/empty", func(_ *engine.ServiceReport, p *service.PortSummary) { p.Ready = 0 })
		f.edit("d/problem", func(s *engine.ServiceReport, _ *service.PortSummary) {
			s.Problems = []service.Problem{{Object: "Service d/problem", Reason: "it is bad"}}
		})
		f.edit("e/ignored", func(s *engine.ServiceReport, p *service.PortSummary) { s.Ignored, p.Ready = "another one's", 0 })
		h := f.handler("")
		if a := get(t, h, ""); a.Rows[0].Rate != nil || a.Totals.Rate != nil || !a.Counts {
			t.Errorf("rates are known at once: %+v", a)
		}
		bubble.Pass(every)
		f.edit("b/busy", func(_ *engine.ServiceReport, p *service.PortSummary) { p.Connections += 400 })
		f.edit("f/fails", func(_ *engine.ServiceReport, p *service.PortSummary) { p.Connections, p.Failed = p.Connections+3, 3 })
		a := get(t, h, "")
		want := []string{"d/problem", "c/empty", "f/fails", "b/busy", "a/quiet", "e/ignored"}
		if got := names(a); !slices.Equal(got, want) {
			t.Errorf("the order is %q, want %q", got, want)
		}
		if r := a.Rows[2]; *r.Rate != 1.5 || *r.FailedRate != 1.5 || r.State == "" {
			t.Errorf("f/fails: %+v", r)
		}
		if *a.Rows[3].Rate != 200 || *a.Totals.Rate != 201.5 || a.Totals.Wrong != 3 || a.Totals.Services != 6 {
			t.Errorf("%+v of %+v", a.Rows[3], a.Totals)
		}
		for query, want := range map[string]string{
			"filter=QU": "a/quiet", "filter=b/+http": "b/busy", "filter=10.96.0.10&state=ignored": "e/ignored",
			"filter=no+endpoint": "c/empty", "filter=nothing": "", "state=wrong&filter=/f": "f/fails", "state=excluded": "",
		} {
			if got := strings.Join(names(get(t, h, query)), " "); got != want {
				t.Errorf("%s: %q, want %q", query, got, want)
			}
		}
		// A data plane that counts anew has no rates below 0, and long gaps have none at all.
		bubble.Pass(every)
		f.edit("b/busy", func(_ *engine.ServiceReport, p *service.PortSummary) { p.Connections = 1 })
		if a := get(t, h, "filter=busy"); *a.Rows[0].Rate != 0 {
			t.Errorf("after a reset: %+v", a.Rows[0])
		}
		bubble.Pass(time.Hour)
		if a := get(t, h, "filter=busy"); a.Rows[0].Rate != nil {
			t.Errorf("after an hour: %+v", a.Rows[0])
		}
	})
}

// TestState_pages cuts pages, and asks the agent once for many browsers.
func TestState_pages(t *testing.T) {
	f := of()
	for i := range 250 {
		f.services[fmt.Sprintf("ns/s%03d", i)] = made(fmt.Sprintf("ns/s%03d", i))
	}
	h := f.handler("")
	for query, want := range map[string]string{
		"": "ns/s000 100 0 3", "page=2": "ns/s200 50 2 3", "page=9": "ns/s200 50 2 3", "page=-1": "ns/s000 100 0 3",
		"page=x": "ns/s000 100 0 3", "page=1&filter=s1": "ns/s100 100 0 1",
	} {
		a := get(t, h, query)
		if got := fmt.Sprint(a.Rows[0].Service, " ", len(a.Rows), " ", a.Page, " ", a.Pages); got != want {
			t.Errorf("%q: %s, want %s", query, got, want)
		}
	}
	if f.asked != 1 {
		t.Errorf("the agent was asked %d times", f.asked)
	}
}

// TestState_absent keeps what was known while the agent is away.
func TestState_absent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := of("shop/cart")
		f.absent = true
		h := f.handler("")
		if a := get(t, h, ""); !strings.Contains(a.Error, "no proxy listens") || len(a.Rows) > 0 {
			t.Errorf("without an agent: %+v", a)
		}
		for _, absent := range []bool{false, true, false} {
			bubble.Pass(every)
			f.change(func() { f.absent = absent })
			if a := get(t, h, ""); (a.Error != "") != absent || len(a.Rows) != 1 {
				t.Errorf("absent is %v: %+v", absent, a)
			}
		}
	})
}

// TestState_endpoints has those of the row that is open.
func TestState_endpoints(t *testing.T) {
	f := of("shop/cart", "a/web")
	h := f.handler("")
	if a := get(t, h, "open=shop/other+http+80/tcp"); a.Open != nil {
		t.Errorf("a Service that is not there is open: %s", a.Open)
	}
	var open engine.Services
	err := json.Unmarshal(get(t, h, "open=shop/cart+http+80/tcp").Open, &open)
	if err != nil || len(open.Services) != 1 || len(open.Services[0].Ports[0].Endpoints) != 2 {
		t.Errorf("%v: %+v", err, open)
	}
	f.absent = true
	if text := string(get(t, h, "open=shop/cart+http+80/tcp").Open); text != `{"error":"no proxy listens on /run/x"}` {
		t.Errorf("without an agent: %s", text)
	}
}
