package daemon

import (
	"context"
	"sync"
	"sync/atomic"

	"fairlead.dev/fairlead/dataplane/iptables"
	"fairlead.dev/fairlead/takeover"
)

// excludedBackends are the backends of iptables in which chains that are named like kube-proxy's may be ours.
type excludedBackends struct {
	looking sync.RWMutex // held for reading while kube-proxy's objects are removed
	waiting atomic.Int32 // for the end of a look
	end     atomic.Value // func(): ends the look
	names   atomic.Pointer[map[string]bool]
}

// look begins one, which is over when the result is called. Its context ends when another plane begins: it may wait for
// a lock of another program.
func (s *excludedBackends) look(ctx context.Context) (_ context.Context, over func()) {
	s.looking.RLock()
	ctx, cancel := context.WithCancel(ctx)
	s.end.Store((func())(cancel))
	if s.waiting.Load() > 0 { // a plane that began before the end was stored
		cancel()
	}
	return ctx, func() {
		cancel()
		s.looking.RUnlock()
	}
}

// set ends a look that could remove what is excluded from now on. The caller may be the engine's goroutine.
func (s *excludedBackends) set(backends ...iptables.Backend) {
	names := map[string]bool{}
	for _, b := range backends {
		switch b {
		case iptables.Legacy:
			names[takeover.IPTablesLegacy] = true
		case iptables.NFTables:
			names[takeover.IPTablesNFT] = true
		}
	}
	for name := range names {
		if !s.has(name) {
			s.waiting.Add(1)
			if end, ok := s.end.Load().(func()); ok {
				end()
			}
			s.looking.Lock()
			s.waiting.Add(-1)
			defer s.looking.Unlock()
			break
		}
	}
	s.names.Store(&names)
}

// all is for while it is not known what other planes have left.
func (s *excludedBackends) all() { s.set(iptables.Legacy, iptables.NFTables) }

// hides reports whether a look sees nothing of iptables.
func (s *excludedBackends) hides() bool {
	return s.has(takeover.IPTablesLegacy) && s.has(takeover.IPTablesNFT)
}

func (s *excludedBackends) has(name string) bool {
	names := s.names.Load()
	return names != nil && (*names)[name]
}
