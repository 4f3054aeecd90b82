package study

import (
	"context"
	"errors"
	"reflect"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/traffic"
	"fairlead.dev/fairlead/model"
)

// workers are a site's processes that ask and answer.
type workers struct {
	clients map[testbed.Place]*traffic.Worker
	server  *traffic.Worker // nil: the testbed's own server is there, or a loop
	loop    *traffic.Loop   // may be nil
	serves  []traffic.Server
}

// client is the one in a place. It lives as long as the site.
func (s *Site) client(ctx context.Context, at testbed.Place) (*traffic.Worker, error) {
	if w := s.workers.clients[at]; alive(w) {
		return w, nil
	}
	w, err := traffic.StartWorker(context.WithoutCancel(ctx), s.Bed, at)
	if err != nil {
		return nil, err
	}
	if s.workers.clients == nil {
		s.workers.clients = map[testbed.Place]*traffic.Worker{}
	}
	s.workers.clients[at] = w
	return w, nil
}

// server is the one that all backends are. If it is to behave in another way than before it is another process. Without
// Ports it serves those of the backends.
func (s *Site) server(ctx context.Context, as ...traffic.Server) (*traffic.Worker, error) {
	for i := range as {
		if as[i].Ports == nil {
			as[i].Ports = s.ports()
		}
	}
	if alive(s.workers.server) && reflect.DeepEqual(s.workers.serves, as) {
		return s.workers.server, nil
	}
	if err := s.closeServer(); err != nil {
		return nil, err
	}
	if err := s.Bed.StopServing(string(ServerPod)); err != nil {
		return nil, err
	}
	w, err := traffic.StartWorker(context.WithoutCancel(ctx), s.Bed, ServerPod)
	if err != nil {
		return nil, err
	}
	for _, what := range as {
		if err := w.Serve(ctx, what); err != nil {
			return nil, errors.Join(err, w.Close())
		}
	}
	s.workers.server, s.workers.serves = w, as
	return w, nil
}

// answerProbes has the testbed's own server answer at the backends' ports, which tells probes its name.
func (s *Site) answerProbes() error {
	if err := s.closeServer(); err != nil {
		return err
	}
	for _, port := range s.ports() {
		if err := s.Bed.Serve(string(ServerPod), testbed.PodPort{Protocol: model.TCP, Port: port}); err != nil {
			return err
		}
	}
	return nil
}

// ports are those of the backends.
func (s *Site) ports() []uint16 {
	if s.OwnPorts {
		return traffic.Ports(BackendPort, max(s.Endpoints, 1))
	}
	return traffic.Ports(BackendPort, 1)
}

func (s *Site) closeServer() error {
	w := s.workers.server
	s.workers.server = nil
	if s.workers.loop != nil {
		s.workers.loop.Close()
		s.workers.loop = nil
	}
	if !alive(w) {
		return nil
	}
	return w.Close()
}

// closeWorkers ends all of them.
func (s *Site) closeWorkers() error {
	err := s.closeServer()
	for _, w := range s.workers.clients {
		if alive(w) {
			err = errors.Join(err, w.Close())
		}
	}
	clear(s.workers.clients)
	return err
}

// alive reports whether there is a worker, and it runs.
func alive(w *traffic.Worker) bool {
	if w == nil {
		return false
	}
	select {
	case <-w.Ended():
		return false
	default:
		return true
	}
}
