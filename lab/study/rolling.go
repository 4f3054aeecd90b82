package study

import (
	"context"
	"errors"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"

	"fairlead.dev/fairlead/lab/testbed/traffic"
)

// rollingExperiment replaces the pods of a Deployment while clients go on.
func rollingExperiment() Experiment {
	return Experiment{
		Description: Description{
			Name: "rolling",
			Does: "connections lost while pods of a Deployment are replaced: new ones, and open ones",
			Source: "kubernetes/kubernetes issue 81775: rolling updates behind IPVS, whose clients use their ports again; " +
				"KEP-1669 on pods that end",
			Figures: clientFigures(),
		},
		Cells:   rollingCells,
		ForIPVS: func(Depth) []Cell { return rollingCells(Standard) },
	}
}

// rollout is a way to replace pods.
type rollout struct {
	replicas, replaced int
	// grace is how long a pod serves after it was announced that it ends.
	grace time.Duration
	pause time.Duration // between two pods
}

func rollingCells(d Depth) (cells []Cell) {
	const pause = 400 * time.Millisecond
	quick := []rollout{{2, 1, 0, pause}, {2, 1, 500 * time.Millisecond, pause}}
	for _, r := range byDepth(d, quick, []rollout{{4, 4, 0, 3 * pause}, {4, 4, time.Second, 3 * pause / 2}}) {
		name := "pods close their port at once"
		if r.grace > 0 {
			name = "pods serve on for a while"
		}
		cells = append(cells, Cell{
			Case: name, Cluster: Cluster{Services: 1000, Endpoints: 1}, Takes: 2 * time.Second, Turn: r.turn,
		})
	}
	return cells
}

func (r rollout) turn(ctx context.Context, s *Site) (f Figures, err error) {
	d, err := s.deploy(ctx, r.replicas+r.replaced, r.replicas)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, d.end()) }()
	// Ports are used again after some half a second, when the server's end of a connection is still remembered.
	const first, ports = 20_000, 300
	c, err := d.ask(ctx, traffic.Ports(first, ports))
	if err != nil {
		return nil, err
	}
	defer c.abandon(ctx)
	const before = 300 * time.Millisecond // until all connections that stay are there
	if err := pause(ctx, before); err != nil {
		return nil, err
	}
	for i := range r.replaced {
		if err := r.replace(ctx, d, i); err != nil {
			return nil, err
		}
	}
	return c.stop(ctx)
}

// replace has a new pod take the place of an old one. The controllers announce that the new one is ready and that the
// old one ends. That one serves open connections to their end, then closes its port and is gone.
func (r rollout) replace(ctx context.Context, d *deployment, i int) error {
	if err := d.become(r.endpoints(d, i, true)...); err != nil {
		return err
	}
	if err := pause(ctx, r.grace); err != nil {
		return err
	}
	// The pods that end come first, so that the last one is never replaced.
	if err := d.replicas[i].Shut(ctx); err != nil {
		return err
	}
	if err := d.become(r.endpoints(d, i, false)...); err != nil {
		return err
	}
	return pause(ctx, r.pause)
}

// endpoints are those while the i-th pod ends, or when it is gone.
func (r rollout) endpoints(d *deployment, i int, ends bool) (all []discoveryv1.Endpoint) {
	if ends {
		e := readyEndpoint(d.address(i))
		e.Conditions = discoveryv1.EndpointConditions{Ready: new(false), Serving: new(true), Terminating: new(true)}
		all = append(all, e)
	}
	for j := range r.replicas {
		all = append(all, readyEndpoint(d.address(i+1+j)))
	}
	return all
}
