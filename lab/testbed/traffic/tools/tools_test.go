package tools_test

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/traffic"
	"fairlead.dev/fairlead/lab/testbed/traffic/tools"
)

func TestMain(m *testing.M) {
	traffic.Main()
	os.Exit(testbed.RunTests(m.Run))
}

func newBed(t *testing.T) *testbed.Bed {
	t.Helper()
	bed, err := testbed.New(t.Context(), testbed.Spec{Pods: []testbed.PodSpec{{Name: "server"}, {Name: "client"}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := bed.Close(); err != nil {
			t.Error(err)
		}
	})
	return bed
}

// need skips the test where a program is not installed.
func need(t *testing.T, program string) {
	t.Helper()
	version, err := tools.Version(t.Context(), program)
	if errors.Is(err, exec.ErrNotFound) {
		t.Skipf("%s is not installed", program)
	}
	if err != nil {
		t.Fatal(err)
	}
	if !strings.ContainsAny(version, "0123456789") {
		t.Errorf("the version of %s is %q", program, version)
	}
}

func start(t *testing.T, bed *testbed.Bed, place testbed.Place) *traffic.Worker {
	t.Helper()
	w, err := traffic.StartWorker(t.Context(), bed, place)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.Close(); err != nil && t.Context().Err() == nil {
			t.Error(err)
		}
	})
	return w
}

func at(bed *testbed.Bed, place testbed.Place) tools.At { return tools.At{Bed: bed, Place: place} }

func targets(bed *testbed.Bed, v6 bool, ports ...uint16) (to []netip.AddrPort) {
	for _, port := range ports {
		to = append(to, netip.AddrPortFrom(bed.Addr("server", v6), port))
	}
	return to
}

// counts is what a result counts, as text.
func counts(r traffic.Result) string {
	s := fmt.Sprintf("%d done, %d bytes", r.Done, r.Bytes)
	for _, kind := range slices.Sorted(maps.Keys(r.Errors)) {
		s += fmt.Sprintf(", %d %s", r.Errors[kind], kind)
	}
	return s
}

func expect(t *testing.T, what, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("%s:\n got %s\nwant %s", what, got, want)
	}
}

// TestClients has the programs ask a worker that delays, and some of it refuses.
func TestClients(t *testing.T) {
	t.Parallel()
	for program, refused := range map[string]string{
		tools.AB: "31 done, 15872 bytes, 19 status other than 2xx", tools.K6: "31 done, 0 bytes, 19 status 503",
	} {
		t.Run(program, func(t *testing.T) {
			t.Parallel()
			need(t, program)
			bed := newBed(t)
			server := start(t, bed, "server")
			const delay = 50 * time.Millisecond
			limit := traffic.Limit{Rate: 1.0 / 3600, Burst: 30, NoDelay: true}
			for _, s := range []traffic.Server{
				{Ports: []uint16{8001}, Bytes: 512, Delay: delay}, {Ports: []uint16{8002}, Bytes: 512, Limit: limit},
			} {
				if err := server.Serve(t.Context(), s); err != nil {
					t.Fatal(err)
				}
			}
			for _, v6 := range []bool{false, true} {
				for _, keep := range []bool{false, true} {
					l := traffic.Load{Targets: targets(bed, v6, 8001), Requests: 40, Concurrency: 10, KeepAlive: keep}
					r, err := at(bed, "client").Run(t.Context(), program, l)
					if err != nil {
						t.Fatal(err)
					}
					if program == tools.K6 {
						r.Bytes = 512 * 40 // it counts those of headers, too
					}
					expect(t, program, counts(r), "40 done, 20480 bytes")
					s, answer := r.Total.Summary(), r.Processing.Summary()
					if s.N != 40 || s.Min < delay.Seconds()*0.97 || answer.Min < delay.Seconds()*0.97 || r.Elapsed < 4*delay {
						t.Errorf("%s: %s, %+v", program, r.Elapsed, s)
					}
					if r.Used.CPU() == 0 || r.Used.MostMemory == 0 {
						t.Errorf("%s has used %+v", program, r.Used)
					}
				}
			}
			r, err := at(bed, "client").Run(t.Context(), program, traffic.Load{
				Targets: targets(bed, false, 8002), Requests: 50, Concurrency: 5,
			})
			if err != nil {
				t.Fatal(err)
			}
			if program == tools.K6 {
				r.Bytes = 0
			}
			expect(t, program, counts(r), refused)
		})
	}
}

// TestNginx compares its limit with that of a worker.
func TestNginx(t *testing.T) {
	t.Parallel()
	need(t, tools.Nginx)
	bed := newBed(t)
	client, worker := start(t, bed, "client"), start(t, bed, "server")
	serve := func(s traffic.Server) {
		d, err := at(bed, "server").StartNginx(t.Context(), s)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		})
		for i := range s.Ports {
			s.Ports[i] += 1000
		}
		if err := worker.Serve(t.Context(), s); err != nil {
			t.Fatal(err)
		}
	}
	run := func(l traffic.Load) traffic.Result {
		r, err := client.Run(t.Context(), l)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	// One in a minute: what is admitted is the burst.
	serve(traffic.Server{
		Ports: []uint16{8001, 8002, 8003}, Bytes: 512, Limit: traffic.Limit{Rate: 1. / 60, Burst: 2, NoDelay: true},
	})
	for _, server := range []uint16{8000, 9000} {
		r := run(traffic.Load{Targets: targets(bed, false, server+1, server+2), Requests: 40, Concurrency: 40})
		if r.Done != 6 || r.Errors["status 503"] != 34 {
			t.Errorf("port %d: %s", server+1, counts(r))
		}
		r = run(traffic.Load{Targets: targets(bed, true, server+3), Requests: 3, KeepAlive: true})
		expect(t, "IPv6", counts(r), "3 done, 1536 bytes")
	}
	serve(traffic.Server{Ports: []uint16{6001}, Limit: traffic.Limit{Rate: 50, Burst: 30}})
	for _, port := range []uint16{6001, 7001} {
		r := run(traffic.Load{Targets: targets(bed, false, port), Requests: 20, Concurrency: 20})
		if took := r.Elapsed; r.Done != 20 || took < 370*time.Millisecond {
			t.Errorf("port %d: %s in %s, 50 in a second are allowed", port, counts(r), took)
		}
	}
}

func TestIPerf3(t *testing.T) {
	t.Parallel()
	need(t, tools.IPerf3)
	bed := newBed(t)
	d, err := at(bed, "server").StartIPerf3(t.Context(), 5201)
	if err != nil {
		t.Fatal(err)
	}
	for _, download := range []bool{false, true} {
		l := traffic.Load{
			Protocol: traffic.Bulk, Targets: targets(bed, download, 5201), Concurrency: 2, Duration: time.Second,
			Interval: 250 * time.Millisecond, Download: download,
		}
		r, err := at(bed, "client").Run(t.Context(), tools.IPerf3, l)
		if err != nil {
			t.Fatal(err)
		}
		if r.Bytes == 0 || len(r.Intervals) < 4 || r.Intervals[1].Bytes == 0 || r.Used.CPU() == 0 || r.Done != 2 {
			t.Errorf("%+v", r)
		}
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if _, err := at(bed, "client").Run(t.Context(), tools.IPerf3, traffic.Load{
		Protocol: traffic.Bulk, Targets: targets(bed, false, 5201), Duration: time.Second,
	}); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Error(err)
	}
}

// TestRefusals are wishes that cannot be fulfilled.
func TestRefusals(t *testing.T) {
	t.Parallel()
	bed := newBed(t)
	to := targets(bed, false, 8001)
	for program, l := range map[string]traffic.Load{
		tools.AB: {Targets: to, Requests: 1, Rate: 5}, tools.K6: {Targets: to}, tools.IPerf3: {Targets: to, Requests: 1},
	} {
		if _, err := at(bed, "client").Run(t.Context(), program, l); !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("%s: %v", program, err)
		}
	}
	delay := traffic.Server{Ports: []uint16{8001}, Delay: time.Second}
	if _, err := at(bed, "server").StartNginx(t.Context(), delay); !errors.Is(err, errors.ErrUnsupported) {
		t.Error(err)
	}
	t.Run("taken", func(t *testing.T) {
		need(t, tools.Nginx)
		if err := start(t, bed, "server").Serve(t.Context(), traffic.Server{Ports: []uint16{8001}}); err != nil {
			t.Fatal(err)
		}
		_, err := at(bed, "server").StartNginx(t.Context(), traffic.Server{Ports: []uint16{8001}})
		if err == nil || !strings.Contains(err.Error(), "Address already in use") {
			t.Error(err)
		}
	})
}
