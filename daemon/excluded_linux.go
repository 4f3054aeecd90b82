package daemon

import (
	"sync"
	"sync/atomic"

	"fairlead.dev/fairlead/dataplane/iptables"
	"fairlead.dev/fairlead/takeover"
)

// excludedBackends are the backends of iptables in which chains that are named like kube-proxy's may be ours.
type excludedBackends struct {
	looking sync.RWMutex // held for reading while kube-proxy's objects are removed
	names   atomic.Pointer[map[string]bool]
}

// set waits for the end of a look that could remove what is excluded from now on. The caller may be the engine's
// goroutine, and a look may wait for a lock of another program.
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
			s.looking.Lock()
			defer s.looking.Unlock()
			break
		}
	}
	s.names.Store(&names)
}

// all is for while it is not known what other planes have left.
func (s *excludedBackends) all() { s.set(iptables.Legacy, iptables.NFTables) }

func (s *excludedBackends) has(name string) bool {
	names := s.names.Load()
	return names != nil && (*names)[name]
}
