package server_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"fairlead.dev/fairlead/metrics"
	"fairlead.dev/fairlead/server"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// options are those of a server that serves everything.
func options() server.Options {
	return server.Options{
		Metrics: metrics.New(metrics.Options{}).Handler(),
		Mode:    func() string { return "nftables" },
		Config: func() map[string]any {
			return map[string]any{"kubeproxy.config.k8s.io": map[string]string{"mode": "nftables"}}
		},
		Flags:     func() map[string]string { return map[string]string{"proxy-mode": "nftables", "config": ""} },
		Version:   "0.1.0",
		Profiling: func() bool { return true },
		Flagz:     func() bool { return true },
		Statusz:   func() bool { return true },
		Verbosity: func(v string) error {
			_, err := strconv.ParseUint(v, 10, 8)
			return err
		},
	}
}

// newServer listens on a port of its own, until the test ends.
func newServer(t *testing.T, o server.Options) *server.Server {
	t.Helper()
	s := server.New(o)
	must(t, s.Listen(t.Context(), "127.0.0.1:0"))
	t.Cleanup(func() { must(t, s.Close()) })
	return s
}

func client(t *testing.T, s *server.Server) *http.Client {
	return dialing(t, func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", s.Address().String())
	})
}

func get(t *testing.T, c *http.Client, path, accept string) string {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), "GET", "http://server"+path, nil)
	must(t, err)
	r.Header.Set("Accept", accept)
	response, err := c.Do(r)
	must(t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	must(t, err)
	return string(body)
}

func exchange(t *testing.T, c *http.Client, method, path, accept, body string) string {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, "http://server"+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if accept != "" {
		r.Header.Set("Accept", accept)
	}
	response, err := c.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if _, err := io.Copy(io.Discard, response.Body); err != nil {
		t.Fatal(err)
	}
	line := strings.Join(strings.Fields(method+" "+path+" "+body+" "+accept), " ")
	kind := strings.TrimSpace(response.Header.Get("Content-Type") + " " + response.Header.Get("Location"))
	warned := ""
	if response.Header.Get("Warning") != "" {
		warned = ", with a warning"
	}
	return fmt.Sprintf("%s => %d %s%s\n", line, response.StatusCode, kind, warned)
}

// dialing makes a client whose every connection goes where dial says.
func dialing(t *testing.T, dial func(context.Context) (net.Conn, error)) *http.Client {
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) }}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

func TestContents(t *testing.T) {
	t.Parallel()
	mode := atomic.Pointer[string]{}
	o := options()
	o.Mode = func() string { return *mode.Load() }
	o.Config = func() map[string]any {
		return map[string]any{
			"kubeproxy.config.k8s.io": map[string]string{"kind": "KubeProxyConfiguration", "mode": *mode.Load()},
		}
	}
	c := client(t, newServer(t, o))
	const asJSON = "application/json;v=v1beta1;g=config.k8s.io;as="
	for _, name := range []string{"nftables", "ebpf"} { // which changes while the server runs
		mode.Store(&name)
		for _, want := range []struct{ path, accept, body string }{
			{"/healthz", "", "ok"},
			{"/healthz?verbose", "", "[+]ping ok\nhealthz check passed\n"},
			{"/proxyMode", "", name},
			{"/configz", "", `{"kubeproxy.config.k8s.io":{"kind":"KubeProxyConfiguration","mode":"` + name + `"}}`},
			{"/flagz", "", "\nfairlead flagz\nFor people, who read what may change; programs ask for application/json.\n" +
				"config=\nproxy-mode=nftables\n"},
			{"/flagz", asJSON + "Flagz", compact(t, `{"kind":"Flagz","apiVersion":"config.k8s.io/v1beta1",
				"metadata":{"name":"fairlead"},"flags":{"config":"","proxy-mode":"nftables"}}`)},
		} {
			body := get(t, c, want.path, want.accept)
			if want.accept != "" {
				body = compact(t, body)
			}
			if body != want.body {
				t.Errorf("%s %s: %q, want %q", want.path, want.accept, body, want.body)
			}
		}
	}
	var status struct {
		Kind, APIVersion, BinaryVersion, EmulationVersion string
		Paths                                             []string
	}
	must(t, json.Unmarshal([]byte(get(t, c, "/statusz", asJSON+"Statusz")), &status))
	if s := fmt.Sprint(status); s != "{Statusz config.k8s.io/v1beta1 0.1.0 1.37 [/configz /flagz /healthz /metrics /proxyMode]}" {
		t.Error(s)
	}
	if body := get(t, c, "/metrics", ""); !strings.Contains(body, "\nkubeproxy_sync_proxy_rules_service_changes_total 0\n") {
		t.Error("/metrics has not what package metrics makes:\n", body)
	}
	if body := get(t, c, "/metrics/slis", ""); !strings.Contains(body, `kubernetes_healthchecks_total{name="ping",status="success",type="healthz"} 4`) {
		t.Error("/metrics/slis does not count /healthz:\n", body)
	}
}

func compact(t *testing.T, text string) string {
	t.Helper()
	var v any
	must(t, json.Unmarshal([]byte(text), &v))
	short, err := json.Marshal(v)
	must(t, err)
	return string(short)
}

// TestSwitches turns pages on and off while the server runs; the others stay.
func TestSwitches(t *testing.T) {
	t.Parallel()
	var profiling, flagz, statusz atomic.Bool
	o := options()
	o.Profiling, o.Flagz, o.Statusz = profiling.Load, flagz.Load, statusz.Load
	c := client(t, newServer(t, o))
	pages := map[*atomic.Bool][]string{
		&profiling: {"/debug/pprof/", "/debug/flags/v", "/debug/pprof/heap"},
		&flagz:     {"/flagz"},
		&statusz:   {"/statusz"},
	}
	expect := func() {
		t.Helper()
		for on, paths := range pages {
			for _, path := range paths {
				have := exchange(t, c, "GET", path, "", "")
				if found := !strings.Contains(have, "404"); found != on.Load() {
					t.Errorf("wanted %v:\n%s", on.Load(), have)
				}
			}
		}
	}
	expect()
	for on := range pages {
		for _, wanted := range []bool{true, false} {
			on.Store(wanted)
			expect()
		}
	}
}

func TestVerbosity(t *testing.T) {
	t.Parallel()
	var sent []string
	o := options()
	o.Verbosity = func(v string) error {
		sent = append(sent, v)
		return nil
	}
	c := client(t, newServer(t, o))
	exchange(t, c, "PUT", "/debug/flags/v", "", "4\n")
	exchange(t, c, "PUT", "/debug/flags/v", "", strings.Repeat("4", 1000)) // more than a number
	exchange(t, c, "GET", "/debug/flags/v", "", "7")
	if fmt.Sprint(sent) != "[4]" {
		t.Error(sent)
	}
}

// TestListen moves a server about. Its addresses are loopback ones of the test's own ports.
func TestListen(t *testing.T) {
	t.Parallel()
	s := newServer(t, options())
	first := s.Address().String()
	c := client(t, s)
	answers := func(where string) {
		t.Helper()
		if body := get(t, c, "/proxyMode", ""); body != "nftables" {
			t.Errorf("%s: %s", where, body)
		}
		c.CloseIdleConnections()
	}
	answers("first")

	must(t, s.Listen(t.Context(), "127.0.0.2:0"))
	answers("another address")
	if _, err := net.Dial("tcp", first); !errors.Is(err, refused) {
		t.Error("the old address still answers:", err)
	}

	_, port, _ := net.SplitHostPort(s.Address().String())
	neighbour, err := net.Listen("tcp", "127.0.0.3:"+port)
	must(t, err)
	if err := s.Listen(t.Context(), "0.0.0.0:"+port); !errors.Is(err, inUse) {
		t.Error("an address that includes one in use:", err)
	}
	answers("after an address that includes one in use")
	must(t, neighbour.Close())

	must(t, s.Listen(t.Context(), "0.0.0.0:"+port))
	answers("all addresses, same port")
	must(t, s.Listen(t.Context(), "0.0.0.0:"+port))
	answers("no change")
	if err := s.Listen(t.Context(), "192.0.2.1:"+port); err == nil {
		t.Error("an address that this machine has not: no error")
	}
	answers("after an address that this machine has not")

	foreign, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer foreign.Close()
	err = s.Listen(t.Context(), foreign.Addr().String())
	if !errors.Is(err, inUse) || !strings.Contains(err.Error(), "--metrics-bind-address") {
		t.Error("an address in use:", err)
	}
	answers("after an address in use")
	if err := s.Listen(t.Context(), "nonsense"); err == nil {
		t.Error("an address that is none: no error")
	}
	answers("after nonsense")

	must(t, s.Listen(t.Context(), ""))
	if s.Address() != nil {
		t.Error("it listens after all:", s.Address())
	}
	must(t, s.Listen(t.Context(), "127.0.0.1:0"))
	answers("again")
}
