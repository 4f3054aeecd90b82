package kube

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/source"
)

var _ source.Source = (*Source)(nil)

// errClosed is what Next returns after Close.
var errClosed = errors.New("the source is closed")

// Source is a source.Source of one cluster, as one of its nodes sees it.
type Source struct {
	log     *slog.Logger
	mirrors []*mirror
	ctx     context.Context // ends with Close
	cancel  context.CancelFunc
	running sync.WaitGroup

	mu      sync.Mutex
	pending service.Batch // what Next has not yet returned
	changed chan struct{} // has a token if Next should look
}

// Source begins to watch the cluster for a node.
func (c *Client) Source(node string) *Source {
	s := c.watch(kinds(node)...)
	c.source.Store(s)
	s.running.Go(func() {
		s.remind(c.timing.reminder, c.server)
		s.remindOfNode(c.timing.reminder)
	})
	return s
}

// watch begins to watch kinds of objects.
func (c *Client) watch(all ...*kind) *Source {
	ctx, cancel := context.WithCancel(context.Background())
	s := &Source{log: c.log, ctx: ctx, cancel: cancel, changed: make(chan struct{}, 1)}
	// The first Batch says "none" of what turns out not to exist.
	s.pending = service.Batch{Node: &service.Node{}, ServiceCIDRs: []netip.Prefix{}}
	for _, k := range all {
		m := newMirror(k, s)
		s.mirrors = append(s.mirrors, m)
		w := &watcher{mirror: m, client: c.groups[k.group], link: c.link, timing: c.timing}
		s.running.Go(func() { w.run(ctx) })
	}
	return s
}

// Next returns what changed since the last call. The first time it waits for all kinds of objects.
func (s *Source) Next(ctx context.Context) (service.Batch, error) {
	for {
		if b, ok := s.take(); ok {
			return b, nil
		}
		select {
		case <-s.changed:
		case <-ctx.Done():
			return service.Batch{}, ctx.Err()
		case <-s.ctx.Done():
			return service.Batch{}, errClosed
		}
	}
}

func (s *Source) take() (service.Batch, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if empty(s.pending) || len(s.missing()) > 0 {
		return service.Batch{}, false
	}
	b := s.pending
	s.pending = service.Batch{}
	return b, true
}

func empty(b service.Batch) bool {
	return len(b.Services)+len(b.Slices)+len(b.Problems)+len(b.Resolved) == 0 && b.Node == nil && b.ServiceCIDRs == nil
}

// missing are the resources that were not yet listed.
func (s *Source) missing() (resources []string) {
	for _, m := range s.mirrors {
		if !m.listed {
			resources = append(resources, m.resource)
		}
	}
	return resources
}

// identity tells an object from an earlier one of its name: by its UID if it has problems, and a Service by when it was
// created. An empty UID and the time 0 are unknown.
func (s *Source) identity(resource string, name service.Name) (uid types.UID, created int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range s.mirrors {
		if m.resource != resource {
			continue
		}
		uid = m.bad[name].uid
		if is, ok := m.known[name].(*service.Service); ok {
			created = is.Created
		}
	}
	return uid, created
}

// update has f write into the pending Batch.
func (s *Source) update(f func(*service.Batch)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f(&s.pending); empty(s.pending) {
		return
	}
	select {
	case s.changed <- struct{}{}:
	default: // there is a token
	}
}

// remind says from time to time what the first Batch waits for.
func (s *Source) remind(every time.Duration, server string) {
	start := time.Now()
	for ; sleep(s.ctx, every); every = min(2*every, maxReminder) {
		s.mu.Lock()
		missing := s.missing()
		s.mu.Unlock()
		if len(missing) == 0 {
			return
		}
		s.log.Warn("still waiting for the first list; until it arrives the rules of this node stay as they are",
			"resource", strings.Join(missing, " "), "server", server, "since", start.Format(time.RFC3339))
	}
}

// remindOfNode says from time to time that there is still no Node, as it may never come: the name is wrong. It returns
// when there is one. The Table reports what that means, and that a Node went.
func (s *Source) remindOfNode(every time.Duration) {
	for there := false; !there && sleep(s.ctx, every); every = min(2*every, maxReminder) {
		s.update(func(b *service.Batch) {
			if there = s.hasNode(); !there {
				b.Node = &service.Node{}
			}
		})
	}
}

func (s *Source) hasNode() bool {
	return slices.ContainsFunc(s.mirrors, func(m *mirror) bool { return m.resource == nodes && len(m.known) > 0 })
}

// Watch is how the watch of one kind of objects does.
type Watch struct {
	Resource    string
	LastMessage time.Time // when the API server last said something, be it a bookmark; or when it was asked first
	Lists       int       // how often all objects were listed; 0: nothing was heard yet
}

// Watches leaves out optional ones that were never listed. It may be called from any goroutine.
func (s *Source) Watches() []Watch {
	var all []Watch
	for _, m := range s.mirrors {
		if n := m.lists.Load(); n > 0 || !m.optional {
			all = append(all, Watch{m.resource, time.Unix(0, m.lastMessage.Load()), int(n)})
		}
	}
	return all
}

// Close ends all watching.
func (s *Source) Close() error {
	s.cancel()
	s.running.Wait()
	return nil
}
