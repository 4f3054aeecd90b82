package outcomestest

import (
	"net"
	"net/netip"
	"os"
	"strings"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/model"
)

// RunIdle has a plane close what is idle for two seconds. That ends for the client and for the backend. Connections
// that are in use live on, and those to other Services.
func (r Orphans) RunIdle(p dataplane.Dataplane) {
	r.Helper()
	state := r.parse(strings.ReplaceAll(orphanRows, "SNAT", r.SNAT))
	r.check(p.Sync(r.Context(), state))
	var idle, others []net.Conn
	for _, place := range r.From {
		for _, to := range service(2) {
			idle = append(idle, r.dial(place, to))
		}
		for _, to := range service(1) {
			others = append(others, r.dial(place, to))
		}
	}
	stop := make(chan struct{})
	busy := r.stream(r.dial(r.From[0], service(2)[0]), stop)
	of := &dataplane.Idle{Backends: backendsOf(state, "default/lives"), Choose: longIdle}
	closed := 0
	for _, c := range idle {
		var end error
		eventually.True(r, "an idle connection is closed", func() bool {
			n, err := p.CloseIdle(r.Context(), of)
			r.check(err)
			closed += n
			end = silent(c)
			return end != nil
		})
		r.Logf("from %s to %s: %v", c.LocalAddr(), c.RemoteAddr(), end)
	}
	eventually.True(r, "all are counted", func() bool {
		n, err := p.CloseIdle(r.Context(), of)
		r.check(err)
		closed += n
		return closed == len(idle)
	})
	eventually.True(r, "the backend has the busy connection alone", func() bool { return r.served() == 1 })
	close(stop)
	if err := <-busy; err != nil {
		r.Errorf("a busy connection: %v", err)
	}
	for _, c := range others {
		if _, err := c.Write([]byte("?\n")); err != nil {
			r.Errorf("a connection to another Service: %v", err)
		}
		r.line(c)
	}
}

func backendsOf(s *model.State, service string) map[netip.AddrPort]bool {
	backends := map[netip.AddrPort]bool{}
	for id, pool := range s.Pools {
		for _, b := range pool.Backends {
			if id.Service == service {
				backends[b.AddrPort()] = true
			}
		}
	}
	return backends
}

// longIdle chooses none while all are idle: the machine has stood still, and with it the connection that is in use.
func longIdle(open []dataplane.Open) (places []int) {
	for i, c := range open {
		if c.Idle >= 2*time.Second {
			places = append(places, i)
		}
	}
	if len(places) == len(open) {
		return nil
	}
	return places
}

// served is how many connections the backend has that lives.
func (r Orphans) served() (n int) {
	r.Helper()
	r.check(r.Bed.Do("lives", func() error {
		for _, table := range []string{"tcp", "tcp6"} {
			text, err := os.ReadFile("/proc/thread-self/net/" + table)
			if err != nil {
				return err
			}
			for line := range strings.Lines(string(text)) {
				const local, state = 1, 3
				f := strings.Fields(line)
				if strings.HasSuffix(f[local], ":0050") && f[state] == "01" {
					n++
				}
			}
		}
		return nil
	}))
	return n
}
