package kube

import (
	"net/http"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/source"
)

// A Batch says up to which version it tells of slices: those of changes, of deletions, and of lists.
func TestSource_versions(t *testing.T) {
	t.Parallel()
	api := cluster(t)
	s := open(t, api.client(nil))
	next := func(want string) {
		t.Helper()
		b := nextBatch(t, s)
		api.mu.Lock()
		defer api.mu.Unlock()
		if b.Version != uint64(api.version) || rows(b) != want {
			t.Errorf("version %d of %d: %s", b.Version, api.version, rows(b))
		}
		for _, slice := range b.Slices.All() {
			if slice != nil && (slice.Version == 0 || slice.Version > b.Version) {
				t.Errorf("a slice of version %d by %d", slice.Version, b.Version)
			}
		}
	}
	next(wholeCluster)
	api.watched()
	api.put(aSlice("web-1", "web", "10.0.0.7"))
	next("slice default/web-1 10.0.0.7")
	api.put(aSlice("web-1", "web", "10.0.0.7")) // a new version of the same is no news
	nothing(t, s, api)
	api.put(aSlice("web-2", "web", "10.0.0.8"))
	next("slice default/web-2 10.0.0.8")
	ends := aSlice("web-2", "web", "10.0.0.8")
	ends.Endpoints[0].Conditions.Terminating = new(true)
	for range 2 { // a node that lists anew asks all others for the second one
		api.put(ends)
		next("slice default/web-2 10.0.0.8")
	}
	api.remove(aSlice("web-2", "web"))
	next("slice default/web-2 gone")
	api.quietly(func() { api.remove(aSlice("web-1", "web")) })
	api.send("endpointslices", watch.Event{Type: watch.Error, Object: &metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusGone, Reason: metav1.StatusReasonExpired,
	}})
	next("slice default/web-1 gone")
}

func nextBatch(t *testing.T, s source.Source) service.Batch {
	t.Helper()
	ctx, cancel := eventually.Context(t.Context())
	defer cancel()
	b, err := s.Next(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
