package httpserve

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"time"
)

// A Server answers on one listener, within the limits of its Pool.
type Server struct {
	pool    *Pool
	handler http.Handler
	http    http.Server
}

// Server makes one that does not listen yet. log has what goes wrong with single connections, at debug level.
func (p *Pool) Server(h http.Handler, log *slog.Logger) *Server {
	l := p.limits
	return &Server{pool: p, handler: h, http: http.Server{
		Handler:           p.guard(h),
		MaxHeaderBytes:    l.HeaderBytes,
		ReadHeaderTimeout: l.Header,
		ReadTimeout:       l.Request,
		WriteTimeout:      l.Answer,
		IdleTimeout:       l.Idle,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		ConnState:         follow,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, c)
		},
	}}
}

// Handler answers what the Server is asked.
func (s *Server) Handler() http.Handler { return s.handler }

// Serve answers until the Server is closed, as http.Server's Serve does.
func (s *Server) Serve(l net.Listener) error { return s.http.Serve(pooled{l, s.pool}) }

// Shutdown is that of http.Server.
func (s *Server) Shutdown(ctx context.Context) error { return s.http.Shutdown(ctx) }

// Close is that of http.Server.
func (s *Server) Close() error { return s.http.Close() }

type connKey struct{} // of the connection in a request's context

// follow notes what http.Server says of a connection.
func follow(inner net.Conn, state http.ConnState) {
	if state == http.StateIdle {
		inner.(*conn).rest()
	}
}

// guard calls a handler when the request is there as a whole, and keeps it from waiting for more.
func (p *Pool) guard(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c := r.Context().Value(connKey{}).(*conn)
		c.accept()
		if p.receive(w, r) {
			c.handle(func() { h.ServeHTTP(w, r) })
		}
	})
}

// receive reads the body, if one is wanted. Otherwise http.Server would wait for it when the answer is ready.
func (p *Pool) receive(w http.ResponseWriter, r *http.Request) (ok bool) {
	control := http.NewResponseController(w)
	asks := r.Method == http.MethodGet || r.Method == http.MethodHead
	switch {
	case r.ContentLength == 0:
	case asks || p.limits.BodyBytes == 0:
		p.report(Body)
		w.Header().Set("Connection", "close")
		_ = control.SetReadDeadline(time.Unix(1, 0)) // no more than the buffer holds is read
		return true
	case !p.readBody(w, r):
		return false
	}
	// The time for a request would also end one that is there and takes long to answer.
	_ = control.SetReadDeadline(time.Time{})
	return true
}

func (p *Pool) readBody(w http.ResponseWriter, r *http.Request) (ok bool) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, p.limits.BodyBytes))
	if large := (*http.MaxBytesError)(nil); errors.As(err, &large) {
		p.report(Body)
		http.Error(w, err.Error(), http.StatusRequestEntityTooLarge)
		return false
	}
	if err != nil {
		http.Error(w, "the body of the request: "+err.Error(), http.StatusBadRequest)
		return false
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	return true
}
