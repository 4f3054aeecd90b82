// Package server is the listener for operators: metrics, and what the process is and does. Paths,
// status codes and content types are kube-proxy's.
//
//	GET /metrics                       package metrics
//	GET /healthz                       ok: the process is there; whether it works, engine's /healthz says
//	GET /proxyMode, /configz           the data plane in force; the configuration in force
//	GET /statusz, /flagz               the process and its flags, as text or as an object of config.k8s.io
//	    /debug/pprof/, /debug/flags/v  profiles and the log's verbosity, if profiling is wanted
//
// The configuration may move the listener and change what it serves while it runs.
package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"

	"fairlead.dev/fairlead/httpserve"
)

// Options say what is served. Functions are called for each request, from several goroutines, so
// that what they tell may change.
type Options struct {
	Metrics http.Handler
	Mode    func() string            // the data plane in force
	Config  func() map[string]any    // by API group of the configuration
	Flags   func() map[string]string // values by name
	Version string                   // of this build, as "0.1.0"
	// Profiling says whether profiles are given out and flags taken, Flagz and Statusz whether these
	// pages are there; nil: never.
	Profiling, Flagz, Statusz func() bool
	// Verbosity sets the log's verbosity to what was sent; nil: it cannot be set.
	Verbosity func(string) error
	// ConnectionClosed gets the listener and the reason, in the words of httpserve, when a limit closes a connection.
	// It may be nil.
	ConnectionClosed func(listener, reason string)
	Log              *slog.Logger // nil: silent
}

// A Server listens on one address at a time, or on none. Its methods may be called from several
// goroutines.
type Server struct {
	handler http.Handler
	pool    *httpserve.Pool
	log     *slog.Logger

	mu      sync.Mutex
	current *listening
}

// listening is an open listener.
type listening struct {
	address string // as it was asked for
	http    *httpserve.Server
	bound   net.Addr
	done    chan struct{}
}

// New makes a Server that does not listen yet.
func New(o Options) *Server {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	pool := httpserve.New(httpserve.Metrics(), o.ConnectionClosed)
	return &Server{handler: newHandler(o), pool: pool, log: o.Log}
}

// Listen moves the Server to an address (host:port; port 0: any), or nowhere if it is empty. Nothing
// happens if it listens there already. The new listener is opened, on the calling thread and thus in
// its network namespace, before the old one is closed, unless both want the same port. After an error
// the Server listens where it did.
func (s *Server) Listen(ctx context.Context, address string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	old := s.current
	if old != nil && old.address == address || old == nil && address == "" {
		return nil
	}
	next, err := s.open(ctx, address)
	if old != nil && errors.Is(err, inUse) && samePort(old.bound.String(), address) {
		return s.replace(ctx, address)
	}
	if err != nil {
		return err
	}
	s.current = next
	if old != nil {
		old.close()
	}
	return nil
}

// replace opens the new listener where the old one may be in the way: on another address with the
// same port.
func (s *Server) replace(ctx context.Context, address string) error {
	old := s.current
	old.close()
	next, err := s.open(ctx, address)
	if err != nil {
		var lost error
		if next, lost = s.open(ctx, old.bound.String()); lost != nil {
			err = errors.Join(err, lost)
		} else {
			next.address = old.address
		}
	}
	s.current = next
	return err
}

func samePort(a, b string) bool {
	_, one, _ := net.SplitHostPort(a)
	_, other, _ := net.SplitHostPort(b)
	return one == other
}

// Address is where the Server listens; nil: nowhere.
func (s *Server) Address() net.Addr {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current == nil {
		return nil
	}
	return s.current.bound
}

// Close stops listening. Requests under way are cut off.
func (s *Server) Close() error { return s.Listen(context.Background(), "") }

func (s *Server) open(ctx context.Context, address string) (*listening, error) {
	if address == "" {
		return nil, nil
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("metrics server: %w; metricsBindAddress (--metrics-bind-address) names the address", err)
	}
	l := &listening{address: address, bound: listener.Addr(), done: make(chan struct{})}
	l.http = s.pool.Server(s.handler, s.log)
	go func() {
		defer close(l.done)
		if err := l.http.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			s.log.Error("metrics server stopped", "address", l.bound, "error", err)
		}
	}()
	return l, nil
}

func (l *listening) close() {
	_ = l.http.Close()
	<-l.done
}
