package daemon

import (
	"testing"

	"fairlead.dev/fairlead/dataplane/iptables"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/takeover"
)

// TestExcluded_looking: a look, which may last for long, is waited for only by a plane that comes.
func TestExcluded_looking(t *testing.T) {
	s := &excludedBackends{}
	s.all()
	look, over := s.look(t.Context())
	cleared, begins := make(chan struct{}), make(chan struct{})
	go func() {
		s.set(iptables.Legacy)
		close(cleared)
	}()
	eventually.Receive(t, "only one plane is left", cleared)
	if look.Err() != nil {
		t.Error("that ends the look")
	}
	go func() {
		s.all()
		close(begins)
	}()
	eventually.True(t, "a plane waits", func() bool {
		free := s.looking.TryRLock() // which fails as soon as a writer waits
		if free {
			s.looking.RUnlock()
		}
		return !free
	})
	eventually.Receive(t, "the look is to end", look.Done())
	if s.has(takeover.IPTablesNFT) {
		t.Error("a look goes on that may remove chains of a plane that has begun")
	}
	over()
	eventually.Receive(t, "a plane begins", begins)
	if !s.has(takeover.IPTablesNFT) || !s.has(takeover.IPTablesLegacy) {
		t.Error("its chains are not excluded")
	}
}
