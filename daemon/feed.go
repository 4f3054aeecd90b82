package daemon

import (
	"context"
	"crypto/sha256"
	"errors"
	"os"
	"strings"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/drain"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/readiness"
	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/addrs"
	"fairlead.dev/fairlead/source/file"
	"fairlead.dev/fairlead/source/kube"
)

func feedIn(c *config.Config) (feedSettings, error) {
	name, err := nodeName(c)
	if err != nil {
		return feedSettings{}, err
	}
	s := feedSettings{node: name, manifests: strings.Join(c.Fairlead.Manifests, "\n")}
	if s.manifests != "" {
		return s, nil
	}
	k := &c.KubeProxy.ClientConnection
	s.readinessGate = c.Fairlead.ReadinessGate
	s.client = kube.ClientOptions{
		Kubeconfig:         k.Kubeconfig,
		Master:             c.Master,
		ContentType:        k.ContentType,
		AcceptContentTypes: k.AcceptContentTypes,
		QPS:                k.QPS,
		Burst:              int(k.Burst),
	}
	if text, err := os.ReadFile(k.Kubeconfig); err == nil { // else Connect will say so
		s.kubeconfig = sha256.Sum256(text)
	}
	return s, nil
}

// feed is where objects come from, and where Events go.
type feed struct {
	settings feedSettings
	source   source.Source
	events   emitter
	leases   drain.API             // nil: there are none
	gate     *readiness.Gate       // nil: there is none
	watches  func() []engine.Watch // nil: there are none
}

// open begins to watch the manifests or the API server, and the addresses of this machine.
func (s feedSettings) open(l *Logs) (f *feed, err error) {
	interfaces, err := addrs.New()
	if err != nil {
		return nil, err
	}
	if f, err = s.openObjects(l); err != nil {
		return nil, errors.Join(err, interfaces.Close())
	}
	f.source = source.Merge(f.source, interfaces)
	return f, nil
}

// openObjects opens the source of objects: manifests if there are any, else the API server. Only the latter takes
// Events, and has watches to report.
func (s feedSettings) openObjects(l *Logs) (*feed, error) {
	f := &feed{settings: s, events: silence{}}
	if s.manifests != "" {
		files, err := file.New(file.Options{Paths: strings.Split(s.manifests, "\n"), Node: s.node, Log: l.Logger()})
		f.source = files
		return f, err
	}
	options := s.client
	options.Log = l.Logger()
	client, err := kube.Connect(options)
	if err != nil {
		return nil, err
	}
	cluster := client.Source(s.node)
	f.source, f.events, f.leases = cluster, client.Events(s.node, component), client
	if s.readinessGate {
		f.gate = (&readiness.Gate{Node: s.node, API: client, Log: l.Logger(), Emit: f.events.Emit}).Open()
	}
	f.watches = func() (all []engine.Watch) {
		watches := cluster.Watches()
		if f.gate != nil {
			watches = append(watches, f.gate.Watches()...)
		}
		for _, w := range watches {
			all = append(all, engine.Watch(w))
		}
		return all
	}
	return f, nil
}

func (f *feed) close() (err error) {
	if f.gate != nil {
		err = f.gate.Close()
	}
	f.events.Close()
	return errors.Join(err, f.source.Close())
}

// primed waits for the first batch of a source and puts it back, so that the next user of the source need not wait.
func primed(ctx context.Context, s source.Source) (source.Source, error) {
	first, err := s.Next(ctx)
	return &primedSource{s, &first}, err
}

type primedSource struct {
	source.Source
	first *service.Batch
}

// Next implements source.Source.
func (p *primedSource) Next(ctx context.Context) (service.Batch, error) {
	if first := p.first; first != nil {
		p.first = nil
		return *first, nil
	}
	return p.Source.Next(ctx)
}
