package engine

import (
	"context"
	"errors"
	"net/http"
	"runtime/debug"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/service"
)

// Services is what "fairlead services" asks for.
type Services struct {
	Now      time.Time       `json:"currentTime"`
	Plane    string          `json:"plane,omitempty"`
	Counts   bool            `json:"counts"` // whether the data plane counts connections
	Services []ServiceReport `json:"services"`
}

// ServiceReport is what the node makes of one Service.
type ServiceReport struct {
	service.Summary
	LastChange
}

// longestTurn is for how long Services are summarised in one turn of the loop: programming waits for that.
const longestTurn = 5 * time.Millisecond

// services answers for the Services of a namespace, or for the one of a name, and lists their endpoints if it is asked
// to. Between two parts of the answer the loop goes on.
func (c *controlServer) services(w http.ResponseWriter, r *http.Request) {
	defer debug.FreeOSMemory() // the answer can be as large as all else
	var names []service.Name
	var counted map[string][]dataplane.Served
	out := Services{Now: time.Now(), Plane: c.engine.report().Plane, Services: []ServiceReport{}}
	err := c.part(r, func(ctx context.Context, v View) error {
		one := service.Name{Namespace: r.FormValue("namespace"), Name: r.FormValue("name")}
		if names = []service.Name{one}; one.Name == "" {
			names = v.Table.ServiceNames(one.Namespace)
		}
		counters, err := v.Plane.Counters(ctx)
		if errors.Is(err, errors.ErrUnsupported) {
			return nil
		}
		out.Counts, counted = err == nil && counters.Connections, byPort(counters.Served)
		return err
	})
	endpoints := r.FormValue("endpoints") != ""
	for len(names) > 0 && err == nil {
		err = c.part(r, func(_ context.Context, v View) error {
			for start := time.Now(); len(names) > 0 && time.Since(start) < longestTurn; names = names[1:] {
				if s, ok := v.Table.Summarise(names[0], endpoints); ok {
					addCounted(&s, counted)
					out.Services = append(out.Services, ServiceReport{s, c.engine.lastChanges[s.Service]})
				}
			}
			return nil
		})
	}
	if err != nil {
		refuse(w, err)
		return
	}
	answer(w, true, out)
}

// byPort groups what backends got by the name of the Service's port.
func byPort(served []dataplane.Served) map[string][]dataplane.Served {
	ports := map[string][]dataplane.Served{}
	for _, s := range served {
		ports[s.Pool.Service] = append(ports[s.Pool.Service], s)
	}
	return ports
}

// addCounted fills in what the data plane has counted. Backends that have left count for their port alone.
func addCounted(s *service.Summary, ports map[string][]dataplane.Served) {
	for i := range s.Ports {
		p := &s.Ports[i]
		name := s.Service
		if p.Name != "" {
			name += ":" + p.Name
		}
		backends := map[string]service.Counted{}
		for _, one := range ports[name] {
			backends[one.Backend.String()] = plus(backends[one.Backend.String()], one)
			p.Counted = plus(p.Counted, one)
		}
		for j := range p.Endpoints {
			p.Endpoints[j].Counted = backends[p.Endpoints[j].At]
		}
	}
}

func plus(c service.Counted, s dataplane.Served) service.Counted {
	c.Connections += s.Connections
	c.Failed += s.Failed
	c.Bytes += s.ToBackend.Bytes + s.ToClient.Bytes
	return c
}
