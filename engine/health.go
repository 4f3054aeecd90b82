package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"fairlead.dev/fairlead/httpserve"
	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/said"
)

// checks are the servers that load balancers ask: /healthz, and one for each row of State.Health. Only the loop opens
// and closes them. Opening may fail, say because an address is still tentative or the process before this one still has
// the port. The loop then tries again: /healthz in each round, a row ever more rarely. Tenants decide how many rows
// cannot be served.
type checks struct {
	healthz  netip.AddrPort // the zero value: none
	leaving  netip.AddrPort // answers until healthz does; the zero value: none
	health   func() (Status, bool)
	timeout  time.Duration           // of health
	about    func() About            // nil: nothing
	more     map[string]http.Handler // beside /healthz, by their paths
	onAnswer func(path string, status int)
	pool     *httpserve.Pool
	servers  map[netip.AddrPort]*server
	refused  map[netip.AddrPort]*refused                   // servers that cannot be opened
	news     []Refusal                                     // since the last round
	share    said.Share                                    // of the lines in the log
	bind     func(at netip.AddrPort) (net.Listener, error) // for a row; an interface need not have the address
	file     healthWriter                                  // of which a responder answers for rows
	running  sync.WaitGroup
}

const (
	// maxOpened is how many servers of rows are opened, or tried, in a round: changes wait for it.
	maxOpened = 128
	// maxRefusedPause is how long the next attempt waits at most.
	maxRefusedPause = 30 * time.Second
)

// refused is a server that cannot be opened.
type refused struct {
	said.Condition
	pause time.Duration
	retry time.Time // not earlier
}

func (r *refused) again(now time.Time) {
	r.pause = min(max(2*r.pause, minBackoff), maxRefusedPause)
	r.retry = now.Add(r.pause)
}

// answerTime is how long an answer may take when its server ends.
const answerTime = time.Second

type server struct {
	*httpserve.Server
	socket net.Listener
	row    atomic.Pointer[model.Health] // of a healthCheckNodePort
}

// newChecks makes those that answer what health says. It may be called from any goroutine.
func newChecks(health func() (Status, bool), pool *httpserve.Pool) *checks {
	return &checks{
		health:  health,
		pool:    pool,
		file:    healthWriter{health: health},
		servers: map[netip.AddrPort]*server{},
		refused: map[netip.AddrPort]*refused{},
		share:   said.Share{Words: 2 * maxReported, While: time.Minute},
		bind:    listenFree,
	}
}

// newChecks makes those of an Engine.
func (e *Engine) newChecks() *checks {
	c := newChecks(func() (Status, bool) { return e.Status(), e.Healthy() },
		httpserve.New(httpserve.Health(), e.options.ConnectionClosed))
	c.healthz, c.timeout, c.about, c.onAnswer = e.options.HealthAddress, e.options.HealthTimeout, e.options.About,
		e.options.Observer.Answered
	c.more = e.options.Health
	c.file.log, c.file.file = e.options.Log, e.options.HealthFile
	return c
}

// follow opens and closes servers so that they are those of the rows. It returns true if it has left some to the next
// round.
func (c *checks) follow(rows map[netip.AddrPort]model.Health, log *slog.Logger) (more bool) {
	if c.file.answers() {
		rows = nil
	}
	wanted := func(at netip.AddrPort) bool {
		_, ok := rows[at]
		return ok || at == c.healthz || at == c.leaving
	}
	for at := range c.servers {
		if !wanted(at) {
			c.end(at)
		}
	}
	maps.DeleteFunc(c.refused, func(at netip.AddrPort, _ *refused) bool { return !wanted(at) })
	_ = c.openHealthz(log) // it is tried again
	now, opened, reported := time.Now(), 0, len(c.news)
	for at, row := range rows {
		if c.servers[at] == nil {
			switch {
			case c.refused[at] != nil && now.Before(c.refused[at].retry):
				continue
			case opened == maxOpened:
				more = true
				continue
			}
			opened++
			_ = c.listen(at, &row, log)
		} else if at != c.healthz {
			c.servers[at].setRow(row)
		}
	}
	c.logRefused(c.news[reported:], log)
	return more
}

// setRow has a server answer what is in a row.
func (s *server) setRow(row model.Health) {
	if defect.Is(defect.HealthCount) {
		row.Local++
	}
	if old := s.row.Load(); old == nil || *old != row {
		s.row.Store(&row)
	}
}

// logRefused has the log name the servers of rows that cannot be opened, in a line for each namespace.
func (c *checks) logRefused(news []Refusal, log *slog.Logger) {
	now, of := time.Now(), map[string][]Refusal{}
	for _, r := range news {
		namespace, _, _ := strings.Cut(r.Service, "/")
		of[namespace] = append(of[namespace], r)
	}
	for _, namespace := range slices.Sorted(maps.Keys(of)) {
		if !c.share.May(namespace, now) {
			continue
		}
		var services []string
		for _, r := range of[namespace] {
			services = append(services, r.Service)
		}
		slices.Sort(services)
		log.Error("cannot answer health checks; trying again, ever more rarely", "service", slices.Compact(services),
			"error", of[namespace][0].Err)
	}
	if more, of := c.share.Withheld(); more > 0 {
		log.Error("more servers that cannot answer health checks", "count", more, "total", of)
	}
}

// move lets /healthz answer elsewhere.
func (c *checks) move(to netip.AddrPort, log *slog.Logger) {
	if c.servers[c.healthz] != nil && to != c.healthz {
		c.leaving = c.healthz
	}
	if c.healthz = to; c.leaving == to {
		c.leaving = netip.AddrPort{}
	}
	_ = c.openHealthz(log)
}

// openHealthz opens /healthz where it should be, and then closes it where it was before. Until there
// is a State it answers 503.
func (c *checks) openHealthz(log *slog.Logger) error {
	if c.healthz.IsValid() && c.servers[c.healthz] == nil {
		// 0.0.0.0 and 127.0.0.1 exclude each other. Where the node does not have the new address, the old one stays.
		if c.healthz.Port() == c.leaving.Port() && bindable(c.healthz.Addr()) {
			c.leave()
		}
		if err := c.listen(c.healthz, nil, log); err != nil {
			return err
		}
	}
	c.leave()
	return nil
}

// bindable reports whether a socket can have an address, on any port.
func bindable(a netip.Addr) bool {
	l, err := net.Listen("tcp", netip.AddrPortFrom(a, 0).String())
	return err == nil && l.Close() == nil
}

func (c *checks) leave() {
	if c.leaving.IsValid() {
		c.end(c.leaving)
	}
	c.leaving = netip.AddrPort{}
}

// end closes a server's socket at once. Accepted connections still get the answer.
func (c *checks) end(at netip.AddrPort) {
	s := c.servers[at]
	delete(c.servers, at)
	_ = s.socket.Close()
	c.running.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), answerTime)
		defer cancel()
		if s.Shutdown(ctx) != nil {
			_ = s.Close()
		}
	})
}

// listen opens the server of a row, or that of /healthz.
func (c *checks) listen(at netip.AddrPort, row *model.Health, log *slog.Logger) error {
	var listener net.Listener
	var err error
	if row == nil {
		listener, err = net.Listen("tcp", at.String())
	} else {
		listener, err = c.bind(at)
	}
	if err != nil {
		err = fmt.Errorf("%w on %s: %w", ErrNotListening, at, err)
		if c.refused[at] == nil {
			c.refused[at] = &refused{}
		}
		c.refused[at].again(time.Now())
		if c.refused[at].Changed(err.Error()) {
			if row != nil {
				c.news = append(c.news, Refusal{at, row.Service, err})
			} else {
				c.news = append(c.news, Refusal{at, "", err})
				log.Error("cannot answer health checks; trying again", "address", at, "error", err)
			}
		}
		return err
	}
	delete(c.refused, at)
	s := &server{socket: listener}
	handler := c.healthzHandler()
	if row != nil {
		s.setRow(*row) // before the first client asks
		handler = c.rowHandler(s)
	}
	s.Server = c.pool.Server(handler, log)
	c.servers[at] = s
	c.running.Go(func() { _ = s.Serve(listener) })
	return nil
}

// takeNews is what could not be opened since it was last called.
func (c *checks) takeNews() []Refusal {
	news := c.news
	c.news = nil
	return news
}

func (c *checks) close() {
	for _, s := range c.servers {
		_ = s.Close()
	}
	c.running.Wait()
}

// ErrNotListening is wrapped by errors about servers that cannot be opened.
var ErrNotListening = errors.New("health checks cannot be answered")

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

// healthzHandler serves three paths. /healthz is for load balancers, and says 503 also if the node is about to go
// (KEP-3836). /livez is for programs that would restart this process, and ignores that. /readyz names each failed check
// at once.
func (c *checks) healthzHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		status, healthy := c.health()
		ok := healthy && status.NodeEligible
		c.answered("/healthz", ok)
		answer(w, ok, health(status, healthy, &status.NodeEligible))
	})
	mux.HandleFunc("GET /livez", c.livezHandler)
	mux.HandleFunc("GET /readyz", c.readyzHandler)
	for path, h := range c.more {
		mux.Handle("GET "+path, h)
	}
	return mux
}

func (c *checks) answered(path string, ok bool) { c.onAnswer(path, httpStatus(ok)) }

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
