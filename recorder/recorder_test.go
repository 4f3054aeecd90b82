package recorder_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/recorder"
)

// recent is what is remembered.
func recent(t *testing.T, r *recorder.Recorder) []recorder.Event {
	t.Helper()
	lines, _ := r.Recent()
	events := make([]recorder.Event, len(lines))
	for i, line := range lines {
		if err := json.Unmarshal(line, &events[i]); err != nil {
			t.Fatal(err)
		}
	}
	return events
}

func TestHandler(t *testing.T) {
	var r recorder.Recorder
	log := slog.New(r.Handler(slog.NewTextHandler(io.Discard, &slog.HandlerOptions{Level: slog.LevelDebug})))
	log.Debug("verbose")
	log.Info("a change is in force", "service", "default/web", "set", 2, "deleted", 1)
	log.With("by", "nft (12)").Warn("rules changed", "drift", "a is missing")
	log.Warn("problem", "object", "Service default/web", "reason", "bad")
	log.Error("failed", "error", errors.New("no"))
	log.Info("programmed", "frontends", 3)
	log.Info("starting")
	var got []string
	for _, e := range recent(t, &r) {
		got = append(got, fmt.Sprint(e.Kind, "|", e.Service, "|", e.Message, "|", e.Details))
	}
	want := []string{
		"rows|default/web|a change is in force|map[deleted:1 set:2]",
		"drift||rules changed|map[by:nft (12) drift:a is missing]",
		"problem||problem|map[object:Service default/web reason:bad]",
		"error||failed|map[error:no]",
		"sync||programmed|map[frontends:3]",
		"info||starting|map[]",
	}
	if !slices.Equal(got, want) {
		t.Errorf("%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func pool(backends ...string) (p model.Pool) {
	for _, b := range backends {
		name, draining := strings.CutSuffix(b, "!")
		x := model.BackendAt(netip.MustParseAddrPort(name))
		if x.Weight = 1; draining {
			x.Weight = 0
		}
		p.Backends = append(p.Backends, x)
	}
	return p
}

// TestRound wants an event for what a pool gains and one for what it loses, and none of programming everything.
func TestRound(t *testing.T) {
	web, local := model.PoolID{Service: "default/web:http"}, model.PoolID{Service: "default/web:http", Local: true}
	only := model.PoolID{Service: "default/only", Local: true}
	const a, b, c = "10.244.1.1:80", "10.244.1.2:80", "10.244.1.3:80"
	state := model.NewState()
	state.Pools[web], state.Pools[local], state.Pools[only] = pool(b, c), pool(b), pool(a)
	before := pool(a, b)
	var many []string
	for i := range 9 {
		many = append(many, fmt.Sprintf("10.244.2.%d:80", i))
	}
	var r recorder.Recorder
	set := func(id model.PoolID, p model.Pool) *model.Change {
		return &model.Change{Pools: model.Delta[model.PoolID, model.Pool]{
			Set: model.Rows[model.PoolID, model.Pool]{{Key: id, Value: p}}}}
	}
	was := func(id model.PoolID) map[model.PoolID]*model.Pool { return map[model.PoolID]*model.Pool{id: &before} }
	for _, x := range []engine.Round{
		{State: state, Verb: engine.Synced},
		{State: state, Verb: engine.Applied, Change: set(web, pool(b, c)), Before: was(web)},
		{State: state, Verb: engine.Applied, Change: set(web, pool(a+"!", b)), Before: was(web)},
		{State: state, Verb: engine.Applied, Change: set(local, pool(b)), Before: was(local)}, // of which web tells
		{State: state, Verb: engine.Applied, Change: set(only, pool(a))},
		{State: state, Verb: engine.Applied, Change: set(web, pool(many...))},
		{State: state, Verb: engine.Applied, Err: errors.New("refused"), Change: set(web, pool(a))},
		{State: state, Verb: engine.Applied, Before: was(web), Change: &model.Change{
			Pools: model.Delta[model.PoolID, model.Pool]{Delete: []model.PoolID{web}}}},
		{State: state, Verb: engine.Synced, Drifts: []dataplane.Drift{{Object: "x", Have: "y"}}},
	} {
		r.Round(x)
	}
	var got []string
	for _, e := range recent(t, &r) {
		got = append(got, fmt.Sprint(e.Kind, " ", e.Service, " ", e.Count, " ", e.Message))
	}
	want := []string{
		"joined default/web:http 1 " + c, "left default/web:http 1 " + a,
		"left default/web:http 1 " + a,
		"joined default/only 1 " + a,
		"joined default/web:http 9 " + strings.Join(many[:5], ", ") + " and 4 more",
		"left default/web:http 2 " + a + ", " + b,
		"repair  1 repaired 1 difference, such as x: surplus: y",
	}
	if !slices.Equal(got, want) {
		t.Errorf("%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// TestRecorder_bounds: a busy namespace does not push out the events of others, and memory stays within its bound.
func TestRecorder_bounds(t *testing.T) {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	var r recorder.Recorder
	r.Record(recorder.Event{Kind: recorder.Joined, Service: "quiet/web", Message: "first"})
	for i := range 50_000 {
		r.Record(recorder.Event{Kind: recorder.Joined, Service: "busy/web", Message: strings.Repeat("x", i%1000)})
		if i%100 == 0 {
			r.Record(recorder.Event{Kind: recorder.Joined, Service: fmt.Sprintf("other-%d/web", i), Message: "one"})
		}
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 2<<20 {
		t.Errorf("the events take %d bytes", grown)
	}
	all := recent(t, &r)
	if all[0].Service != "quiet/web" || len(all) < 1000 {
		t.Errorf("%d events, of which the first one is %+v", len(all), all[0])
	}
	if _, forgotten := r.Recent(); forgotten.IsZero() {
		t.Error("it does not say that there was no room for some")
	}
}

func TestRecorder_span(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r recorder.Recorder
		r.Record(recorder.Event{Message: "old"})
		bubble.Pass(recorder.Span / 2)
		r.Record(recorder.Event{Message: "new"})
		bubble.Pass(recorder.Span/2 + time.Second)
		if all := recent(t, &r); len(all) != 1 || all[0].Message != "new" {
			t.Errorf("%+v", all)
		}
	})
}

// TestFollow: a follower that does not read delays nothing, and learns how many events it missed.
func TestFollow(t *testing.T) {
	var r recorder.Recorder
	f := r.Follow()
	const more = 10
	n := cap(f.Events) + more
	for range n {
		r.Record(recorder.Event{Message: "x"})
	}
	if got := f.LeftOut(); len(f.Events) != n-more || got != more || f.LeftOut() != 0 {
		t.Errorf("%d events wait, and %d were left out", len(f.Events), got)
	}
	f.Close()
	r.Record(recorder.Event{Message: "x"})
	if f.LeftOut() != 0 {
		t.Error("it gets events after Close")
	}
}

func BenchmarkRecord(b *testing.B) {
	var r recorder.Recorder
	for i := range b.N {
		r.Record(recorder.Event{Kind: recorder.Joined, Service: fmt.Sprintf("ns-%d/web", i%5000), Message: "10.244.1.1:80"})
	}
}
