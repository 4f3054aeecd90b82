package engine

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"runtime/debug"
	"strings"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/httpserve"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/said"
)

// patience is how long a question waits for the loop.
const patience = 10 * time.Second

// controlServer answers questions of the same machine's root over a Unix socket. On Windows these are of its
// administrators, over loopback:
//
//	GET /dump                 the rows, in canonical text form
//	GET /counters             what the data plane has counted
//	GET /explain?…            what happens to a packet, see packet
//	GET /services?…           what becomes of Services, a Services
//	GET /status               how programming goes, a Report
//	GET /audit                what in the kernel is not as it should be, an Audited
//
// and what Options.Control adds. With format=json the first three answer in JSON, as the others always do.
type controlServer struct {
	engine  *Engine
	path    string // of the socket; empty: none
	door    door   // checks the right to ask
	http    *httpserve.Server
	closing chan struct{}
	done    chan struct{}
}

// controlRetry is the time between two attempts to open the control socket.
const controlRetry = time.Second

// openControl opens the control socket. To serve is more than to answer, so that a failure, which is said
// once, ends nothing; it is tried again.
func (e *Engine) openControl(path string) {
	e.control = e.newControl(path)
	listener, err := e.control.listen()
	go e.control.run(listener, err)
}

// serveControl is openControl for a socket that must be opened now.
func (e *Engine) serveControl(path string) (*controlServer, error) {
	c := e.newControl(path)
	listener, err := c.listen()
	if err != nil {
		return nil, err
	}
	go c.run(listener, nil)
	return c, nil
}

func (e *Engine) newControl(path string) *controlServer {
	c := &controlServer{
		engine: e, path: path, door: newDoor(), closing: make(chan struct{}), done: make(chan struct{}),
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /dump", c.dump)
	mux.HandleFunc("GET /counters", c.counters)
	mux.HandleFunc("GET /explain", c.explain)
	mux.HandleFunc("GET /services", c.services)
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) { answer(w, true, e.report()) })
	mux.HandleFunc("GET /audit", c.audit)
	for path, h := range e.options.Control {
		mux.Handle(path, h)
	}
	c.http = httpserve.New(httpserve.Control(), e.options.ConnectionClosed).Server(c.door.admit(mux), e.options.Log)
	return c
}

// listen returns nil if there shall be no socket.
func (c *controlServer) listen() (net.Listener, error) {
	if c.path == "" {
		return nil, nil
	}
	listener, err := c.door.listen(c.path)
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	return listener, nil
}

// run answers. Before that it tries to get the socket, whatever the loop waits for: as long as nothing is
// programmed, people ask most.
func (c *controlServer) run(listener net.Listener, err error) {
	defer close(c.done)
	for refused := (said.Condition{}); err != nil; listener, err = c.listen() {
		if refused.Changed(err.Error()) {
			c.engine.options.Log.Error("cannot open the control socket: fairlead status, audit and switch fail, packets are "+
				"served; trying again", "error", err)
			c.engine.options.ControlRefused(err)
		}
		select {
		case <-time.After(controlRetry):
		case <-c.closing:
			return
		}
	}
	if listener != nil {
		_ = c.http.Serve(listener)
	}
}

func (c *controlServer) close() {
	close(c.closing)
	_ = c.http.Close() // which removes the socket, too
	<-c.done
}

// ask has the loop compute an answer.
func (c *controlServer) ask(w http.ResponseWriter, r *http.Request, f func(context.Context, View) (any, error)) {
	var body any
	err := c.part(r, func(ctx context.Context, v View) (err error) {
		body, err = f(ctx, v)
		return err
	})
	if err != nil {
		refuse(w, err)
		return
	}
	if r.FormValue("format") == "json" {
		answer(w, true, body)
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	fmt.Fprint(w, body)
}

// part has the loop compute a part of an answer.
func (c *controlServer) part(r *http.Request, f func(context.Context, View) error) error {
	ctx, cancel := context.WithTimeout(r.Context(), patience)
	defer cancel()
	return c.engine.Do(ctx, f)
}

func refuse(w http.ResponseWriter, err error) {
	http.Error(w, "the proxy is busy or still starting: "+err.Error(), http.StatusServiceUnavailable)
}

func (c *controlServer) dump(w http.ResponseWriter, r *http.Request) {
	defer debug.FreeOSMemory() // the text can be as large as all else
	c.ask(w, r, func(_ context.Context, v View) (any, error) {
		return dumped{State: v.State.Clone(), objects: v.Plane.Describe()}, nil
	})
}

func (c *controlServer) counters(w http.ResponseWriter, r *http.Request) {
	c.ask(w, r, func(ctx context.Context, v View) (any, error) { return v.Plane.Counters(ctx) })
}

// dumped are the rows, and what the plane says of its objects. Parsers of the dump see the latter as comments.
type dumped struct {
	*model.State
	objects []string
}

func (d dumped) String() string {
	var text strings.Builder
	text.WriteString(d.State.String())
	for _, o := range d.objects {
		text.WriteString("# " + o + "\n")
	}
	return text.String()
}

// audit may take longer than other questions: it reads all that the kernel holds.
func (c *controlServer) audit(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), c.engine.options.HealthTimeout/2)
	defer cancel()
	var a Audited
	err := c.engine.Do(ctx, func(ctx context.Context, _ View) (err error) {
		a, err = c.engine.auditNow(ctx)
		return err
	})
	if err != nil {
		http.Error(w, "the kernel could not be compared: "+err.Error(), http.StatusServiceUnavailable)
		return
	}
	answer(w, true, a)
}

func (c *controlServer) explain(w http.ResponseWriter, r *http.Request) {
	p, err := packet(r.URL.Query())
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	c.ask(w, r, func(ctx context.Context, v View) (any, error) {
		x := v.Table.Explain(p)
		kept, err := remembered(ctx, v, p)
		if kept.IsValid() {
			x.Reasons = append(x.Reasons, fmt.Sprintf("session affinity: the client keeps %s", kept))
		}
		return x, err
	})
}

// remembered is the backend that session affinity holds for the packet's client.
func remembered(ctx context.Context, v View, p model.Packet) (netip.AddrPort, error) {
	d := v.State.Lookup(p)
	if !p.Source.IsValid() || d.Verdict != model.Forward || v.State.Pools[d.Pool].Affinity == 0 {
		return netip.AddrPort{}, nil
	}
	session := dataplane.Session{Pool: d.Pool, Client: p.Source}
	if ok, err := session.Find(ctx, v.Plane, v.State); !ok {
		return netip.AddrPort{}, err
	}
	return session.Backend, nil
}

// packet reads a question with four values. source is an address; without it the node sends. destination is
// address:port, and protocol is tcp by default. interface is the one on which the packet arrives; without it a process
// of the node sends.
func packet(q url.Values) (p model.Packet, err error) {
	if name := q.Get("source"); name != "" {
		if p.Source, err = netip.ParseAddr(name); err != nil {
			return p, fmt.Errorf("source: %w", err)
		}
	}
	if p.Destination, err = netip.ParseAddrPort(q.Get("destination")); err != nil {
		return p, fmt.Errorf("destination: %w", err)
	}
	p.Protocol = model.TCP
	if name := q.Get("protocol"); name != "" {
		if p.Protocol, err = model.ParseProtocol(name); err != nil {
			return p, fmt.Errorf("protocol: %w", err)
		}
	}
	p.Interface = q.Get("interface")
	return p, nil
}

// Ask puts a question, such as "/dump?format=json", to the process that listens on a control socket,
// and returns its answer.
func Ask(ctx context.Context, socket, question string) ([]byte, error) {
	answer, err := Order(ctx, socket, http.MethodGet, question)
	if err != nil {
		return nil, err
	}
	defer answer.Close()
	return io.ReadAll(answer)
}

// A Refused is the answer of a process that will not do what it is asked.
type Refused struct {
	Status int // of HTTP
	Text   string
}

// Error implements error.
func (r Refused) Error() string { return r.Text }

// Order is Ask for what is not only a question. The answer is to be closed; to do so before its end hangs up.
func Order(ctx context.Context, socket, method, what string) (io.ReadCloser, error) {
	r, err := http.NewRequestWithContext(ctx, method, "http://fairlead"+what, nil)
	if err != nil {
		return nil, err
	}
	response, err := knock(socket, r)
	if err != nil {
		return nil, fmt.Errorf("ask the running proxy: %w", err)
	}
	if response.StatusCode == http.StatusOK {
		return response.Body, nil
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	return nil, cmp.Or(err, error(Refused{response.StatusCode, strings.TrimSpace(string(body))}))
}
