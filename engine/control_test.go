package engine

import (
	"context"
	"encoding/json"
	"iter"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/handover"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// affinityPlane remembers one backend for all clients.
type affinityPlane struct{ dataplane.Dataplane }

func (affinityPlane) Sessions(_ context.Context, s *model.State) iter.Seq2[dataplane.Session, error] {
	return func(yield func(dataplane.Session, error) bool) {
		for id := range s.Pools {
			yield(dataplane.Session{
				Pool: id, Client: netip.MustParseAddr("10.244.1.9"), Backend: netip.MustParseAddrPort("10.244.1.2:8080"),
				Until: time.Now().Add(time.Hour),
			}, nil)
		}
	}
}

func TestControl(t *testing.T) {
	noGoroutineLeft(t)
	r := newRig(t)
	socket := filepath.Join(t.TempDir(), "control")
	r.start(func(o *Options) {
		o.ControlSocket, o.Plane = socket, affinityPlane{Dataplane: o.Plane}
		o.About = func() About { return About{Plane: "memory", Watches: []Watch{{Resource: "nodes"}}} }
	})
	b := web(1, "10.244.1.2")
	for _, s := range b.Services.All() {
		s.Affinity = time.Hour
	}
	r.send(b)
	if err := r.engine.Do(t.Context(), func(context.Context, View) error { return nil }); err != nil {
		t.Fatal(err)
	}
	ask := func(question string) string {
		t.Helper()
		text, err := Ask(t.Context(), socket, question)
		if err != nil {
			t.Fatalf("%s: %v", question, err)
		}
		return string(text)
	}
	if got := ask("/dump"); got != r.state.String() {
		t.Errorf("dump:\n%s", got)
	}
	var dump struct {
		Frontends []struct{ Address, Pool string }
		Pools     []struct {
			Name     string
			Backends []struct{ Address string }
		}
	}
	if err := json.Unmarshal([]byte(ask("/dump?format=json")), &dump); err != nil || len(dump.Frontends) != 1 ||
		dump.Frontends[0].Pool != dump.Pools[0].Name || dump.Pools[0].Backends[0].Address != "10.244.1.2:8080" {
		t.Errorf("%+v %v", dump, err)
	}
	question := "/explain?source=10.244.1.9&destination=10.96.0.1:80&interface=eth0"
	if got := ask(question); !strings.Contains(got, "default/web-1") || !strings.Contains(got, "keeps 10.244.1.2:8080") {
		t.Error(got)
	}
	if got := ask(question + "&format=json"); !json.Valid([]byte(got)) {
		t.Error(got)
	}
	checkReport(t, ask("/status"), count(r.state))
	for question, part := range map[string]string{
		"/explain?source=x":                                  "source:",
		"/explain?source=::1&destination=y":                  "destination:",
		"/explain?source=::1&destination=[::1]:1&protocol=z": "protocol:",
		"/nothing": "404",
	} {
		if _, err := Ask(t.Context(), socket, question); err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%s: %v", question, err)
		}
	}
	checkPrivate(t, socket)
	r.stop()
	if _, err := os.Stat(socket); !os.IsNotExist(err) {
		t.Error("the socket is still there")
	}
	if _, err := Ask(t.Context(), socket, "/dump"); err == nil {
		t.Error("nobody answered, and that is no error")
	}
}

func checkReport(t *testing.T, text string, rows Rows) {
	t.Helper()
	var r Report
	err := json.Unmarshal([]byte(text), &r)
	if err != nil || r.InForceSince.IsZero() || r.InForceSince.After(r.LastProgrammed) || r.Now.Before(r.LastProgrammed) ||
		!r.Healthy || r.Plane != "memory" || len(r.Watches) != 1 || r.Rows != rows {
		t.Errorf("%s %v", text, err)
	}
}

// It is said, and tried again until it works, whatever the loop waits for.
func TestControl_pathIsNoSocket(t *testing.T) {
	noGoroutineLeft(t)
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	start := func() (*rig, chan error) {
		r, refused := newRig(t), make(chan error, 10)
		r.start(func(o *Options) { o.ControlSocket, o.ControlRefused = path, func(err error) { refused <- err } })
		if err := <-refused; !strings.Contains(err.Error(), "is not a socket") {
			t.Error(err)
		}
		return r, refused
	}
	r, _ := start()
	r.stop() // while it waits
	if text, err := os.ReadFile(path); string(text) != "precious" {
		t.Error(string(text), err)
	}
	r, refused := start()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	var text []byte
	eventually.Nil(t, "the socket answers", func() (err error) {
		text, err = Ask(t.Context(), path, "/status")
		return err
	})
	var report Report
	if err := json.Unmarshal(text, &report); err != nil || report.Healthy { // nothing is programmed
		t.Errorf("%s %v", text, err)
	}
	r.stop()
	if got := r.log.String(); strings.Count(got, "is not a socket") != 1 || len(refused) > 0 {
		t.Error(got)
	}
}

// Programs that read JSON find the keys of the release before beside the new ones.
func TestControl_oldKeys(t *testing.T) {
	drift := []dataplane.Drift{{Class: "frontends"}}
	for _, c := range []struct {
		answer any
		keys   string
	}{
		{Report{About: About{Draining: []handover.Kept{{}}}, Status: Status{AuditUnfinishedSince: time.Now(), Undone: &Undone{Author: "nft"}}},
			"draining carrying auditUnfinishedSince uncheckedSince author by healthy nodeEligible"},
		{Audited{ExternalChanges: []dataplane.ExternalChange{{What: "x"}}, Refused: drift}, "externalChanges foreign refused lacking drifts"},
		{service.Explanation{Excluded: []service.Excluded{{}}}, "excluded leftOut verdict"},
		{dataplane.Counters{Dials: &dataplane.Dials{}, Tables: []dataplane.Table{{Evictions: 1}}},
			"retried rescued unanswered lost evictions yielded capacity"},
	} {
		text, err := json.Marshal(c.answer)
		if err != nil {
			t.Fatal(err)
		}
		for key := range strings.FieldsSeq(c.keys) {
			if !strings.Contains(string(text), `"`+key+`":`) {
				t.Errorf("%T has no %s: %s", c.answer, key, text)
			}
		}
	}
}
