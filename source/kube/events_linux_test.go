package kube

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
)

// eventRows are all Events of the cluster as sorted text.
func eventRows(t testing.TB, plane *kubernetes.ControlPlane) string {
	t.Helper()
	list, err := plane.Client().EventsV1().Events("").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var rows []string
	for _, e := range list.Items {
		if e.ReportingController != "kube-proxy" {
			continue
		}
		row := fmt.Sprintf("%s %s/%s %s %s %s %q", e.Type, e.Regarding.Kind, e.Regarding.Name, e.Reason, e.Action, e.ReportingInstance, e.Note)
		if e.Series != nil {
			row += fmt.Sprintf(" x%d", e.Series.Count)
		}
		rows = append(rows, row)
	}
	slices.Sort(rows)
	return strings.Join(rows, "\n")
}

// describe is what kubectl says of an object.
func describe(t *testing.T, plane *kubernetes.ControlPlane, object ...string) string {
	t.Helper()
	path, err := plane.Kubeconfig(t.TempDir(), kubernetes.Admin())
	if err != nil {
		t.Fatal(err)
	}
	args := append([]string{"--kubeconfig", path, "describe"}, object...)
	out, err := exec.CommandContext(t.Context(), kubernetes.NeedParts(t).Path("kubectl"), args...).CombinedOutput()
	if err != nil {
		t.Fatalf("kubectl %v: %v\n%s", args, err, out)
	}
	return string(out)
}

func TestEvents(t *testing.T) {
	t.Parallel()
	logs, log := newLogbook()
	plane := newPlane(t, kubernetes.Options{APIServerArgs: []string{"--service-cluster-ip-range=10.96.0.0/16"}})
	apply(t, plane, aService("web", "10.96.0.10"))
	for _, name := range []string{"n1", "n2", "n3"} {
		if _, err := plane.Client().CoreV1().Nodes().Create(t.Context(), aNode(name), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := plane.Client().DiscoveryV1().EndpointSlices("default").Create(t.Context(), aSlice("web-1", "web"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	c := connectReal(t, plane, log)
	bad := Event{Object: "Service default/web", Warning: true, Reason: "BadObject", Message: "it is bad", Everywhere: true}
	for _, node := range []string{"n1", "n2"} { // the second finds that all is said
		e := c.Events(node, "kube-proxy")
		e.Emit(bad)
		e.Emit(Event{Object: "Service default/gone", Reason: "Nobody", Message: "would look"})
		e.Emit(bad)
		e.Close()
	}
	e := c.Events("n1", "kube-proxy")
	e.Emit(Event{Reason: "Starting", Action: "StartKubeProxy"})
	e.Emit(Event{Object: "EndpointSlice default/web-1", Reason: "Bad", Message: strings.Repeat("ä", 1000)})
	e.Emit(Event{Object: "Node n1", Warning: true, Reason: "Drift", Message: "again"})
	e.Emit(Event{Object: "Node n1", Warning: true, Reason: "Drift", Message: "again"})
	e.Emit(Event{Object: "Node n1", Warning: true, Reason: "Drift", Message: "again"})
	e.Emit(Event{Object: "Namespace kube-public", Warning: true, Reason: "Share", Message: "is used up"})
	want := strings.Join([]string{
		`Normal EndpointSlice/web-1 Bad Bad kube-proxy-n1 "` + strings.Repeat("ä", 512) + `"`,
		`Normal Node/n1 Starting StartKubeProxy kube-proxy-n1 ""`,
		`Warning Namespace/kube-public Share Share kube-proxy-n1 "is used up"`,
		`Warning Node/n1 Drift Drift kube-proxy-n1 "again" x3`,
		`Warning Service/web BadObject BadObject kube-proxy-n1 "it is bad"`,
	}, "\n")
	eventually.Equal(t, "Events", want, func() string { return eventRows(t, plane) })
	e.Close()
	if e.nodes != 3 {
		t.Errorf("it counted %d nodes", e.nodes)
	}
	if got := eventRows(t, plane); got != want {
		t.Errorf("events:\n%s\nwant\n%s", got, want)
	}
	for _, c := range []struct {
		object []string
		want   string
	}{
		{[]string{"service", "web"}, "BadObject"}, {[]string{"node", "n1"}, "Starting"}, {[]string{"endpointslice", "web-1"}, "Bad "},
	} {
		if text := describe(t, plane, c.object...); !strings.Contains(text[strings.Index(text, "\nEvents:"):], c.want) {
			t.Errorf("kubectl describe %v has no %s:\n%s", c.object, c.want, text)
		}
	}
	if l := logs.with(""); l != nil {
		t.Errorf("it works, but logs:\n%s", strings.Join(l, ""))
	}
}

// A source without the right to write Events logs that once.
func TestEvents_forbidden(t *testing.T) {
	t.Parallel()
	logs, log := newLogbook()
	server := newServer(t)
	var posted atomic.Int32
	server.setFault(func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method == http.MethodPost {
			posted.Add(1)
		}
		refuse(w, http.StatusForbidden, metav1.StatusReasonForbidden)
		return true
	})
	e := server.client(log).Events("n1", "kube-proxy")
	for i := range 10 {
		e.Emit(Event{Reason: "Some", Message: fmt.Sprint(i)})
	}
	eventually.Equal(t, "requests", 10, posted.Load) // Close does not wait for long
	e.Close()
	e.Emit(Event{Reason: "Late"})
	if l := logs.with(""); len(l) != 1 || !strings.Contains(l[0], "forbids a request") || posted.Load() != 10 {
		t.Errorf("%d requests, logs:\n%s", posted.Load(), strings.Join(l, ""))
	}
}

// A storm reaches the API server as a breeze, and the emitter does not feel either.
func TestEvents_storm(t *testing.T) {
	t.Parallel()
	_, log := newLogbook()
	server := newServer(t)
	var posted atomic.Int32
	first := make(chan string, 1)
	server.setFault(func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodPost {
			return false
		}
		posted.Add(1)
		select {
		case first <- r.URL.Path:
		default:
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(w).Encode(eventsv1.Event{TypeMeta: metav1.TypeMeta{Kind: "Event", APIVersion: "events.k8s.io/v1"}})
		return true
	})
	e := server.client(log).Events("n1", "kube-proxy")
	start := time.Now()
	for i := range 100_000 {
		e.Emit(Event{Reason: "Storm", Message: fmt.Sprint(i)})
	}
	if took := time.Since(start); took > eventually.Patience() { // the server takes hours for so many
		t.Errorf("Emit waits: %v", took)
	}
	if path := <-first; path != "/apis/events.k8s.io/v1/namespaces/"+corev1.NamespaceDefault+"/events" {
		t.Error(path)
	}
	e.Close()
	if n := posted.Load(); n > eventBurst+5+int32(time.Since(start).Seconds()*float64(eventsPerSecond)) {
		t.Errorf("%d events were written", n)
	}
}

// Closing does not wait for a server that is away.
func TestEvents_serverAway(t *testing.T) {
	t.Parallel()
	server := newServer(t)
	server.shut()
	e := server.client(nil).Events("n1", "kube-proxy")
	e.Emit(Event{Reason: "Starting"})
	start := time.Now()
	e.Close()
	e.Close()
	if took := time.Since(start); took > defaultTiming().flush+10*time.Second {
		t.Errorf("Close took %v", took)
	}
}

// takeEvents has the server accept Events, and returns a function that tells which came, one line each.
func (s *apiServer) takeEvents() func() []string {
	var mu sync.Mutex
	var rows []string
	s.setFault(func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodPost {
			return false
		}
		text, err := io.ReadAll(r.Body)
		if err != nil {
			s.t.Error(err)
		}
		event := &eventsv1.Event{}
		if err := runtime.DecodeInto(s.codecs.UniversalDeserializer(), text, event); err != nil {
			s.t.Error(err)
		}
		mu.Lock()
		rows = append(rows, fmt.Sprintf("%s %s %s %s", event.Reason, event.Regarding.Kind, event.Regarding.Name, event.Regarding.UID))
		mu.Unlock()
		w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
		w.WriteHeader(http.StatusCreated)
		_, _ = w.Write(s.encode(event))
		return true
	})
	return func() []string {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(rows)
	}
}

// About ten nodes report what all nodes find, however many there are.
func TestEvents_everywhere(t *testing.T) {
	t.Parallel()
	const objects, nodes = 20, 500
	server := newServer(t)
	server.nodes = nodes
	events := server.takeEvents()
	client := server.client(nil)
	var all errgroup.Group
	all.SetLimit(8) // Close does not wait for long
	for n := range nodes {
		all.Go(func() error {
			e := client.Events(fmt.Sprint("n", n), "kube-proxy")
			for o := range objects {
				e.Emit(Event{Object: fmt.Sprint("Service default/bad-", o), Reason: "Bad", Everywhere: true})
			}
			e.Close()
			return nil
		})
	}
	_ = all.Wait() // they have no errors
	said := map[string]int{}
	for _, row := range events() {
		said[row]++
	}
	// With these bounds it fails by bad luck in one of 20,000 runs, or less.
	if n := len(events()); len(said) < objects-1 || n < speakers*objects/2 || n > speakers*objects*2 {
		t.Errorf("%d requests about %d of %d objects", n, len(said), objects)
	}
}

// Those that write it do not all do so at once, and what is the node's own does not wait for it.
func TestEvents_spread(t *testing.T) {
	t.Parallel()
	server := newServer(t)
	server.nodes = speakers // so that each speaks
	events := server.takeEvents()
	client := server.client(nil)
	client.timing.spread = time.Hour // that is, maxSpread for all of them
	client.timing.flush = eventually.Patience()
	e := client.Events("n1", "kube-proxy")
	everywhere := Event{Object: "Node n1", Reason: "Everywhere", Everywhere: true}
	const many = 10 // the first of them comes within a second in one of six runs
	for i := range many {
		everywhere.Message = fmt.Sprint(i)
		e.Emit(everywhere)
		e.Emit(everywhere)
	}
	e.Emit(Event{Reason: "Own"})
	eventually.True(t, "there is an Event of the Node", func() bool { return slices.Contains(events(), "Own Node n1 n1") })
	if n := len(events()); n > many/2 {
		t.Errorf("%d of %d were written at once", n-1, many)
	}
	e.Close()
	if n := len(events()); n != many+1 {
		t.Errorf("%d Events were written, want each once, the last ones by Close", n)
	}
}

// The UID of an object that came with a problem is known without asking.
func TestEvents_badObject(t *testing.T) {
	t.Parallel()
	server := cluster(t)
	bad := aService("bad", "no address")
	bad.UID = "seen"
	badRange := aCIDR("bad", "no range")
	badRange.UID = "seen, too"
	server.put(bad, badRange)
	events := server.takeEvents()
	client := server.client(nil)
	client.timing.flush = eventually.Patience()
	expect(t, open(t, client), "cidr 10.96.0.0/16\nnode n1 [192.0.2.1]\n"+
		"problem Service default/bad spec.clusterIPs[0]\nproblem ServiceCIDR bad spec.cidrs[0]\nservice default/bad []\nservice default/web [10.96.0.1]\n"+
		"slice default/web-1 10.0.0.1 10.0.0.2")
	e := client.Events("n1", "kube-proxy")
	e.Emit(Event{Object: "Service default/bad", Reason: "Bad", Everywhere: true})
	e.Emit(Event{Object: "Service default/web", Reason: "Conflicts", Everywhere: true})
	e.Emit(Event{Object: "ServiceCIDR bad", Reason: "Bad", Everywhere: true})
	e.Close()
	got := events()
	slices.Sort(got)
	if want := []string{"Bad Service bad seen", "Bad ServiceCIDR bad seen, too", "Conflicts Service web found"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	server.mu.Lock()
	defer server.mu.Unlock()
	for _, r := range server.requests {
		if strings.Contains(r, "metadata.name%3Dbad") {
			t.Errorf("%s, though its UID was in the watch", r)
		}
	}
}

// An object that comes in place of another one has its own Events, and not those of each version again.
func TestEvents_successor(t *testing.T) {
	t.Parallel()
	server := cluster(t)
	bad, other := aService("bad", "no address"), aService("other", "10.96.0.9")
	bad.UID = "1"
	server.put(bad, other)
	events := server.takeEvents()
	client := server.client(nil)
	client.timing.series = time.Hour
	source := open(t, client)
	expect(t, source, "cidr 10.96.0.0/16\nnode n1 [192.0.2.1]\nproblem Service default/bad spec.clusterIPs[0]\n"+
		"service default/bad []\nservice default/other [10.96.0.9]\nservice default/web [10.96.0.1]\n"+
		"slice default/web-1 10.0.0.1 10.0.0.2")
	server.watched()
	e := client.Events("n1", "kube-proxy")
	defer e.Close()
	say := func(want ...string) {
		t.Helper()
		for _, name := range []string{"bad", "other"} {
			e.Emit(Event{Object: "Service default/" + name, Reason: "Bad"})
			e.Emit(Event{Object: "Service default/" + name, Reason: "Bad"})
		}
		e.Emit(Event{Object: "Service default/web", Reason: "Done", Message: fmt.Sprint(len(want))})
		eventually.Equal(t, "Events", strings.Join(want, "\n"), func() string { return strings.Join(events(), "\n") })
	}
	first := []string{"Bad Service bad 1", "Bad Service other found", "Done Service web found"}
	say(first...)
	server.remove(bad, other)
	expect(t, source, "resolved Service default/bad\nservice default/bad gone\nservice default/other gone")
	bad.UID, other.CreationTimestamp = "2", metav1.Unix(1, 0)
	server.put(bad, other)
	expect(t, source, "problem Service default/bad spec.clusterIPs[0]\nservice default/bad []\n"+
		"service default/other [10.96.0.9]")
	say(append(first, "Bad Service bad 2", "Bad Service other found", "Done Service web found")...)
}

// An Event of which the count is refused, as in a namespace that is gone, is forgotten like others.
func TestEvents_countRefused(t *testing.T) {
	t.Parallel()
	server := newServer(t)
	events := server.takeEvents() // and no patches
	client := server.client(nil)
	client.timing.flush = eventually.Patience()
	e := client.Events("n1", "kube-proxy")
	for range 2 {
		e.Emit(Event{Reason: "Again"})
	}
	e.Close()
	for _, s := range e.written {
		s.last = s.last.Add(-2 * rememberTime)
	}
	before := len(e.written)
	e.countAll()
	if len(events()) != 1 || before != 1 || len(e.written) > 0 {
		t.Errorf("%q were written, %d were remembered, and %d are", events(), before, len(e.written))
	}
}
