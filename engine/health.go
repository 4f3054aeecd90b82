package engine

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"fairlead.dev/fairlead/model"
)

// checks are the servers that load balancers ask: /healthz, and one for each row of State.Health.
// They are opened and closed by the loop alone. One that cannot be opened, say because an address is
// still tentative or the process before this one still has the port, is tried again whenever the
// loop goes round.
type checks struct {
	healthz netip.AddrPort // the zero value: none
	health  func() (Status, bool)
	told    func(path string, status int)
	servers map[netip.AddrPort]*server
	refused map[netip.AddrPort]string // what the log knows of those that cannot be opened
	running sync.WaitGroup
}

type server struct {
	http.Server
	row atomic.Pointer[model.Health] // of a healthCheckNodePort
}

func newChecks(e *Engine) *checks {
	return &checks{
		healthz: e.options.HealthAddress,
		health:  func() (Status, bool) { return e.Status(), e.Healthy() },
		told:    e.options.Observer.Answered,
		servers: map[netip.AddrPort]*server{},
		refused: map[netip.AddrPort]string{},
	}
}

// open opens /healthz, which is to answer, with 503, before there is a State.
func (c *checks) open(log *slog.Logger) { c.follow(model.NewState(), log) }

// follow opens and closes servers so that they are those of the rows.
func (c *checks) follow(s *model.State, log *slog.Logger) {
	for at, server := range c.servers {
		if _, ok := s.Health[at]; !ok && at != c.healthz {
			_ = server.Close()
			delete(c.servers, at)
		}
	}
	maps.DeleteFunc(c.refused, func(at netip.AddrPort, _ string) bool {
		_, ok := s.Health[at]
		return !ok && at != c.healthz
	})
	if c.healthz.IsValid() && c.servers[c.healthz] == nil {
		c.listen(c.healthz, c.healthzHandler(), log)
	}
	for at, row := range s.Health {
		if c.servers[at] == nil {
			c.listen(at, nil, log)
		}
		if server := c.servers[at]; server != nil && at != c.healthz {
			server.row.Store(&row)
		}
	}
}

// listen opens a server. Without a handler it is that of a row.
func (c *checks) listen(at netip.AddrPort, handler http.Handler, log *slog.Logger) {
	listener, err := net.Listen("tcp", at.String())
	if err != nil {
		if c.refused[at] != err.Error() {
			log.Warn("cannot answer health checks; trying again", "address", at, "error", err)
		}
		c.refused[at] = err.Error()
		return
	}
	delete(c.refused, at)
	s := &server{}
	if handler == nil {
		handler = c.rowHandler(s)
	}
	s.Handler = handler
	s.ReadHeaderTimeout, s.IdleTimeout = 5*time.Second, time.Minute
	s.ErrorLog = slog.NewLogLogger(log.Handler(), slog.LevelDebug)
	c.servers[at] = s
	c.running.Go(func() { _ = s.Serve(listener) })
}

func (c *checks) close() {
	for _, s := range c.servers {
		_ = s.Close()
	}
	c.running.Wait()
}

// proxyHealth is kube-proxy's answer (pkg/proxy/healthcheck/proxy_health.go).
type proxyHealth struct {
	LastUpdated  time.Time               `json:"lastUpdated"`
	CurrentTime  time.Time               `json:"currentTime"`
	NodeEligible *bool                   `json:"nodeEligible,omitempty"`
	Healthy      bool                    `json:"healthy"`
	Status       map[string]familyHealth `json:"status"`
}

type familyHealth struct {
	LastUpdated time.Time `json:"lastUpdated"`
	Healthy     bool      `json:"healthy"`
}

// healthzHandler serves /healthz, which is for load balancers and says 503 also if the node is about
// to go (KEP-3836), and /livez, which is for whoever would restart this process and does not.
func (c *checks) healthzHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		status, healthy := c.health()
		ok := healthy && status.NodeEligible
		c.answered("/healthz", ok)
		answer(w, ok, health(status, healthy, &status.NodeEligible))
	})
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) {
		status, healthy := c.health()
		c.answered("/livez", healthy)
		answer(w, healthy, health(status, healthy, nil))
	})
	return mux
}

func (c *checks) answered(path string, ok bool) { c.told(path, httpStatus(ok)) }

// health fills in the answer. Both families are programmed together. As with kube-proxy, lastUpdated
// is the present while all is well: clients of old take a time long ago for an illness.
func health(s Status, healthy bool, eligible *bool) proxyHealth {
	h := proxyHealth{LastUpdated: s.LastProgrammed, CurrentTime: time.Now(), NodeEligible: eligible, Healthy: healthy}
	if healthy {
		h.LastUpdated = h.CurrentTime
	}
	family := familyHealth{h.LastUpdated, healthy}
	h.Status = map[string]familyHealth{"IPv4": family, "IPv6": family}
	return h
}

type serviceHealth struct {
	Service struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"service"`
	LocalEndpoints      int  `json:"localEndpoints"`
	ServiceProxyHealthy bool `json:"serviceProxyHealthy"`
}

// rowHandler answers, at any path, whether a load balancer should send the Service's traffic here
// (pkg/proxy/healthcheck/service_health.go).
func (c *checks) rowHandler(s *server) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		row := s.row.Load()
		if row == nil { // opened this moment
			http.Error(w, "starting", http.StatusServiceUnavailable)
			return
		}
		body := serviceHealth{LocalEndpoints: row.Local}
		_, body.ServiceProxyHealthy = c.health()
		body.Service.Namespace, body.Service.Name, _ = strings.Cut(row.Service, "/")
		w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.Itoa(row.Local))
		answer(w, row.Local > 0 && body.ServiceProxyHealthy, body)
	})
}

func answer(w http.ResponseWriter, ok bool, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(httpStatus(ok))
	text, err := json.Marshal(body)
	if err != nil { // none of our types can
		text = []byte(strconv.Quote(err.Error()))
	}
	fmt.Fprintf(w, "%s\n", text)
}

func httpStatus(ok bool) int {
	if ok {
		return http.StatusOK
	}
	return http.StatusServiceUnavailable
}
