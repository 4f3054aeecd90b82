package study

import (
	"context"
	"time"
)

// costFigures are those of every turn: what it took of the processors, and whose processes it was. Kernel work for a
// packet counts as time of the process that it interrupts.
func costFigures() []Figure {
	return []Figure{
		{Name: "cpu.proxy", Unit: Seconds, Better: Lower, Does: "processor time of the proxy and its children in a turn"},
		{Name: "cpu.clients", Unit: Seconds, Does: "processor time of those who ask, in a turn"},
		{Name: "cpu.servers", Unit: Seconds, Does: "processor time of those who answer, in a turn"},
	}
}

// costs are what the processes of a site have taken so far.
type costs struct {
	pid                     int // the proxy's; 0: there is none
	proxy, clients, servers time.Duration
}

// costs of what does not tell are 0.
func (s *Site) costs(ctx context.Context) (c costs) {
	if s.Proxy != nil {
		if u, err := s.Proxy.Usage(); err == nil {
			c.pid, c.proxy = s.Proxy.Pid(), u.CPU
		}
	}
	for _, w := range s.workers.clients {
		if used, err := w.CPU(ctx); alive(w) && err == nil {
			c.clients += used
		}
	}
	if w := s.workers.server; alive(w) {
		if used, err := w.CPU(ctx); err == nil {
			c.servers = used
		}
	}
	return c
}

// addTo adds what was taken since to the figures of a turn. Processes that started meanwhile are left out.
func (c costs) addTo(f Figures, before costs) {
	if c.pid != 0 && c.pid == before.pid {
		f["cpu.proxy"] = (c.proxy - before.proxy).Seconds()
	}
	if c.clients > before.clients && before.clients > 0 {
		f["cpu.clients"] = (c.clients - before.clients).Seconds()
	}
	if c.servers > before.servers && before.servers > 0 {
		f["cpu.servers"] = (c.servers - before.servers).Seconds()
	}
}
