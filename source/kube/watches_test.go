package kube

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/lab/eventually"
)

func TestWatches(t *testing.T) {
	t.Parallel()
	server := cluster(t)
	s := open(t, server.client(nil)).(*Source)
	if _, err := s.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	before := s.Watches()
	var have []string
	for _, w := range before {
		if time.Since(w.LastMessage) > time.Minute {
			t.Error(w)
		}
		have = append(have, fmt.Sprint(w.Resource, " ", w.Lists))
	}
	slices.Sort(have)
	if text := strings.Join(have, ", "); text != "endpointslices 1, nodes 1, servicecidrs 1, services 1" {
		t.Error(text)
	}

	server.put(aService("other", "10.96.0.2"))
	if _, err := s.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	// The Reflector tells of the version after it has handed over the object.
	eventually.True(t, "the event is heard", func() bool {
		return lastMessage(s, "services").After(find(before, "services").LastMessage)
	})
	if w := find(s.Watches(), "nodes"); w != find(before, "nodes") {
		t.Error("nothing was said of nodes:", w)
	}
}

// A server that never answers is silent from the start. Of an optional resource it may be that there is none.
func TestWatches_neverAnswered(t *testing.T) {
	t.Parallel()
	server := cluster(t)
	server.setFault(func(w http.ResponseWriter, _ *http.Request) bool {
		refuse(w, http.StatusServiceUnavailable, metav1.StatusReasonServiceUnavailable)
		return true
	})
	began := time.Now()
	s := open(t, server.client(nil)).(*Source)
	var have []string
	for _, w := range s.Watches() {
		if w.Lists != 0 || w.LastMessage.Before(began) || w.LastMessage.After(time.Now()) {
			t.Errorf("%+v, asked at %v", w, began)
		}
		have = append(have, w.Resource)
	}
	slices.Sort(have)
	if text := strings.Join(have, ", "); text != "endpointslices, nodes, services" {
		t.Error(text)
	}
}

func lastMessage(s *Source, resource string) time.Time {
	return find(s.Watches(), resource).LastMessage
}

func find(all []Watch, resource string) Watch {
	return all[slices.IndexFunc(all, func(w Watch) bool { return w.Resource == resource })]
}
