package engine

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// masquerade is newTable's options with one difference that rows show.
func masquerade() service.Options {
	return service.Options{NodeIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, MasqueradeAll: true}
}

func TestEngine_configureTheTable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.start(func(o *Options) { o.AuditInterval = 10 * time.Hour })
		r.send(web(1, "10.244.1.2"))
		r.converged()
		before := r.kernel.String()
		bad := masquerade()
		bad.NodePortAddresses = []string{"everywhere"}
		if err := r.engine.Configure(t.Context(), Settings{Table: bad}); err == nil || !strings.Contains(err.Error(), "everywhere") {
			t.Fatal(err)
		}
		r.converged()
		if err := r.engine.Configure(t.Context(), Settings{Table: masquerade(), AuditInterval: 10 * time.Hour}); err != nil {
			t.Fatal(err)
		}
		if err := r.want.Configure(masquerade()); err != nil {
			t.Fatal(err)
		}
		r.state, _, _ = r.want.Update(service.Batch{})
		synctest.Wait() // no time passes: the loop goes round at once
		if got := r.kernel.String(); got != r.state.String() || got == before {
			t.Fatalf("kernel:\n%s\nwant:\n%s", got, r.state)
		}
		r.send(web(2, "10.244.1.3"))
		r.converged()
		r.stop()
		if got := r.kernel.Calls(); !slices.Equal(got, []string{"sync", "apply", "apply"}) {
			t.Fatal(got) // nothing is programmed twice
		}
	})
}

// Where nothing has arrived yet, a configuration is what may help.
func TestEngine_configureBeforeTheFirstBatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.kernel.Do(func(s *model.State) { s.Guards[netip.MustParsePrefix("10.96.0.0/16")] = model.Drop })
		r.start(nil)
		if err := r.engine.Configure(t.Context(), Settings{Table: masquerade()}); err != nil {
			t.Fatal(err)
		}
		bubble.Pass(time.Hour)
		if calls := r.kernel.Calls(); calls != nil {
			t.Fatal("programmed before the first batch:", calls)
		}
		if err := r.want.Configure(masquerade()); err != nil {
			t.Fatal(err)
		}
		r.send(web(1, "10.244.1.2"))
		r.converged()
		r.stop()
	})
}

func TestEngine_configureTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.start(func(o *Options) { o.AuditInterval, o.HealthTimeout = 10*time.Hour, 10*time.Second })
		r.send(web(1, "10.244.1.2"))
		r.converged()
		s := Settings{AuditInterval: time.Second} // the timeout stays
		if err := r.engine.Configure(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		audits := func(when string) {
			t.Helper()
			before := len(r.kernel.Calls())
			bubble.Pass(time.Minute)
			if n := len(r.kernel.Calls()) - before; n < 59 || n > 61 {
				t.Errorf("%s: %d audits in a minute, want one each second", when, n)
			}
		}
		audits("at once")
		r.setFault(func(string) error { return errBroken })
		r.send(web(2, "10.244.1.3"))
		bubble.Pass(9 * time.Second)
		if !r.engine.Healthy() {
			t.Error("unhealthy before the timeout")
		}
		bubble.Pass(2 * time.Second)
		if r.engine.Healthy() {
			t.Error("healthy after the timeout")
		}
		r.setFault(nil)
		bubble.Pass(time.Minute)
		audits("after a failure")
		r.stop()
		if err := r.engine.Configure(t.Context(), Settings{}); !errors.Is(err, ErrStopped) {
			t.Error(err)
		}
	})
}

func TestEngine_replaceSource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		var rounds rounds
		r.start(func(o *Options) { o.AuditInterval, o.Observer = 10*time.Hour, &rounds })
		r.send(web(1, "10.244.1.2"))
		synctest.Wait() // else the first turn has both
		r.send(web(2, "10.244.1.2"))
		r.converged()
		before := r.kernel.String()

		next := script{make(chan service.Batch, 1), make(chan error, 1)}
		table := newTable(t)
		if err := r.engine.Replace(t.Context(), Parts{Source: next, Table: table}); err != nil {
			t.Fatal(err)
		}
		bubble.Pass(time.Hour)
		if got := r.kernel.String(); got != before || !r.engine.Healthy() {
			t.Fatalf("before the first batch of the new source: healthy %v, kernel:\n%s", r.engine.Healthy(), got)
		}
		// Replaced once more, while it waits.
		last := script{make(chan service.Batch, 1), make(chan error, 1)}
		if err := r.engine.Replace(t.Context(), Parts{Source: last, Table: newTable(t)}); err != nil {
			t.Fatal(err)
		}
		next.batches <- web(9) // which is not read any more
		last.batches <- web(2, "10.244.1.9")
		r.want = newTable(t) // what the old source said is forgotten
		r.state, _, _ = r.want.Update(web(2, "10.244.1.9"))
		synctest.Wait()
		if got := r.kernel.String(); got != r.state.String() {
			t.Fatalf("kernel:\n%s\nwant:\n%s", got, r.state)
		}
		r.script.batches, r.script.err = last.batches, last.err
		r.send(web(3, "10.244.1.4"))
		r.converged()
		r.stop()
		if got := r.kernel.Calls(); !slices.Equal(got, []string{"sync", "apply", "sync", "apply"}) {
			t.Fatal(got)
		}
		for _, round := range rounds.all() {
			if round.State == nil {
				t.Error("a round without a State")
			}
		}
	})
}

// programmed waits until the loop has gone round with a State.
func (r *rig) programmed() {
	r.t.Helper()
	if err := r.engine.Do(r.t.Context(), func(context.Context, View) error { return nil }); err != nil {
		r.t.Fatal(err)
	}
}

func refuses(t *testing.T, at netip.AddrPort) {
	t.Helper()
	if conn, err := net.Dial("tcp", at.String()); err == nil {
		conn.Close()
		t.Errorf("%s still listens", at)
	}
}

func TestEngine_moveHealthz(t *testing.T) {
	noGoroutineLeft(t)
	r := newRig(t)
	a, b := freeAddress(t), freeAddress(t)
	r.start(func(o *Options) { o.HealthAddress = a })
	r.send(web(1, "10.244.1.2"))
	get(t, "http://"+a.String()+"/healthz", 200)
	move := func(to netip.AddrPort) {
		t.Helper()
		if err := r.engine.Configure(t.Context(), Settings{HealthAddress: to}); err != nil {
			t.Fatal(err)
		}
	}
	move(b)
	get(t, "http://"+b.String()+"/healthz", 200)
	refuses(t, a)
	// The same port on all addresses can only be had once the old socket is closed.
	everywhere := netip.AddrPortFrom(netip.IPv4Unspecified(), b.Port())
	move(everywhere)
	get(t, "http://"+b.String()+"/healthz", 200)
	move(netip.AddrPortFrom(netip.MustParseAddr("192.0.2.17"), b.Port())) // no interface has it
	get(t, "http://"+b.String()+"/healthz", 200)
	move(netip.AddrPort{})
	refuses(t, b)
	move(a)
	get(t, "http://"+a.String()+"/healthz", 200)
	r.stop()
}

// While the new address cannot be listened at, the old one answers.
func TestEngine_moveHealthzToATakenPort(t *testing.T) {
	noGoroutineLeft(t)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t)
	a, b := freeAddress(t), taken.Addr().(*net.TCPAddr).AddrPort()
	r.start(func(o *Options) { o.HealthAddress, o.AuditInterval = a, 10*time.Millisecond })
	r.send(web(1, "10.244.1.2"))
	r.programmed()
	s := Settings{HealthAddress: b, AuditInterval: 10 * time.Millisecond}
	if err := r.engine.Configure(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		r.programmed()
		get(t, "http://"+a.String()+"/healthz", 200)
	}
	if err := taken.Close(); err != nil {
		t.Fatal(err)
	}
	get(t, "http://"+b.String()+"/healthz", 200)
	r.programmed()
	refuses(t, a)

	// Back to where it still is.
	taken, err = net.Listen("tcp", a.String())
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	for _, to := range []netip.AddrPort{a, b} {
		s.HealthAddress = to
		if err := r.engine.Configure(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		r.programmed()
		get(t, "http://"+b.String()+"/healthz", 200)
	}
	r.stop()
}

// Work that belongs to Settings is done once they are accepted, and they wait for it.
func TestEngine_configureWith(t *testing.T) {
	r := newRig(t)
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	r.start(func(o *Options) { o.ControlSocket = a })
	r.send(web(1, "10.244.1.2"))
	r.programmed()
	bad := masquerade()
	bad.NodePortAddresses = []string{"everywhere"}
	for name, s := range map[string]Settings{
		"a socket in a file": {ControlSocket: filepath.Join(a, "c"), Table: masquerade()},
		"a table":            {ControlSocket: b, Table: bad},
	} {
		err := r.engine.ConfigureWith(t.Context(), s, func() error {
			t.Errorf("%s: the other thing is done", name)
			return nil
		})
		if err == nil {
			t.Errorf("%s is not refused", name)
		}
	}
	s := Settings{ControlSocket: b, Table: masquerade()}
	if err := r.engine.ConfigureWith(t.Context(), s, func() error { return errBroken }); !errors.Is(err, errBroken) {
		t.Error(err)
	}
	if got, err := Ask(t.Context(), a, "/dump"); err != nil || string(got) != r.state.String() {
		t.Errorf("after a refused configuration: %v\n%s", err, got)
	}
	if _, err := os.Stat(b); !errors.Is(err, os.ErrNotExist) {
		t.Error("the refused socket is there:", err)
	}
	if err := r.engine.ConfigureWith(t.Context(), s, func() error {
		_, err := Ask(t.Context(), a, "/dump")
		return err
	}); err != nil {
		t.Error(err)
	}
	if _, err := Ask(t.Context(), b, "/dump"); err != nil {
		t.Error(err)
	}
	r.stop()
}

func TestEngine_moveControlSocket(t *testing.T) {
	noGoroutineLeft(t)
	r := newRig(t)
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	r.start(func(o *Options) { o.ControlSocket = a })
	r.send(web(1, "10.244.1.2"))
	r.programmed()
	if err := os.WriteFile(b, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := r.engine.Configure(t.Context(), Settings{ControlSocket: b, Table: masquerade()}); err == nil {
		t.Fatal("no error though the path is a file")
	}
	if got, err := Ask(t.Context(), a, "/dump"); err != nil || string(got) != r.state.String() {
		t.Fatalf("after a refused configuration: %v\n%s", err, got) // the table's options are the old ones, too
	}
	if err := os.Remove(b); err != nil {
		t.Fatal(err)
	}
	if err := r.engine.Configure(t.Context(), Settings{ControlSocket: b}); err != nil {
		t.Fatal(err)
	}
	if _, err := Ask(t.Context(), b, "/dump"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(a); !errors.Is(err, os.ErrNotExist) {
		t.Error("the old socket is still there:", err)
	}
	bad := masquerade()
	bad.NodePortAddresses = []string{"everywhere"}
	if err := r.engine.Configure(t.Context(), Settings{ControlSocket: a, Table: bad}); err == nil {
		t.Fatal("no error though the table refuses")
	}
	if _, err := Ask(t.Context(), b, "/dump"); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(a); !errors.Is(err, os.ErrNotExist) {
		t.Error("the refused socket is there:", err)
	}
	r.stop()
	if _, err := os.Stat(b); !errors.Is(err, os.ErrNotExist) {
		t.Error("after Run:", err)
	}
}

func TestEngine_hardFail(t *testing.T) {
	noGoroutineLeft(t)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	at := taken.Addr().(*net.TCPAddr).AddrPort()
	r := newRig(t)
	r.start(func(o *Options) { o.HealthAddress, o.HardFail = at, true })
	err = <-r.result
	if !errors.Is(err, ErrNotListening) || !strings.Contains(err.Error(), at.String()) {
		t.Fatal(err)
	}
	if err := r.engine.Configure(t.Context(), Settings{}); !errors.Is(err, ErrStopped) {
		t.Error(err)
	}
}

func TestEngine_answersAreObserved(t *testing.T) {
	noGoroutineLeft(t)
	r := newRig(t)
	var rounds rounds
	at := freeAddress(t)
	r.start(func(o *Options) { o.HealthAddress, o.Observer = at, &rounds })
	get(t, "http://"+at.String()+"/livez", http.StatusServiceUnavailable)
	r.send(web(1, "10.244.1.2"))
	r.programmed()
	get(t, "http://"+at.String()+"/healthz", http.StatusOK)
	r.stop()
	got := rounds.answers()
	if got[0] != "/livez 503" || got[len(got)-1] != "/healthz 200" {
		t.Error(got)
	}
}
