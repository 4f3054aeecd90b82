package study

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// updateExperiment changes one Service and one endpoint at a time, and looks on from a client.
func updateExperiment() Experiment {
	figure := func(name, does string) Figure { return Figure{Name: name, Unit: Seconds, Better: Lower, Does: does} }
	changed := figure("endpoint changed",
		"from the watch event to the first connection that reaches the new endpoint; one begins every 0.5 ms")
	changed.Main, changed.Margin = true, 0.2
	return Experiment{
		Description: Description{
			Name: "update", Axis: "Services",
			Does: "one Service or endpoint is added, changed or removed: the time until new connections follow",
			Source: "H. Xie, Scale Kubernetes to Support 50,000 Services (KubeCon Europe 2017): rules of one Service added, " +
				"iptables and IPVS; repeated by others since",
			Figures: []Figure{
				changed,
				figure("service added", "from the first watch event, of two, to the first connection that is answered"),
				figure("endpoint removed", "until no connection reaches the last endpoint"),
				figure("endpoint added", "until the first endpoint answers again"),
				figure("service removed", "until no connection is answered"),
			},
		},
		Cells: updateCells, ForIPVS: updateCells,
	}
}

func updateCells(d Depth) (cells []Cell) {
	limit := byDepth(d, 30*time.Second, 2*time.Minute)
	all := []int{1, 100, 500, 1000, 1500, 2000, 5000, 10_000, 15_000, 20_000}
	for _, n := range byDepth(d, []int{100, 4000}, all) {
		cells = append(cells, Cell{
			Size: n, Cluster: Cluster{Services: n, Endpoints: 1}, Takes: 3 * time.Second, Contenders: proxies,
			Turn: func(ctx context.Context, s *Site) (Figures, error) {
				ctx, cancel := context.WithTimeout(ctx, limit)
				defer cancel()
				return updateTurn(ctx, s)
			},
		})
	}
	return cells
}

// proxies leaves out contenders without a proxy. The first one takes part once more, on a site of its own: differences
// between the two are chance.
func proxies(all []Contender) (some []Contender) {
	for _, c := range all {
		if c.Kind != Direct && c.Kind != Again {
			some = append(some, c)
		}
	}
	if len(some) > 0 {
		again := some[0]
		again.Name += " again"
		some = append(some, again)
	}
	return some
}

// The pods of a Service that changes.
const oldPod, newPod = "update-old", "update-new"

// updatePort is a port of the pods that no turn before has had. kube-proxy ipvs keeps what it has removed in a list for
// minutes. A backend that comes back meanwhile is not removed a second time.
func (s *Site) updatePort() uint16 {
	const first, ports = 9000, 10_000
	s.updates++
	return uint16(first + s.updates%ports)
}

// update is a Service that is added to a Site, changed and removed again.
type update struct {
	*Site
	service *corev1.Service
	slice   *discoveryv1.EndpointSlice
}

func updateTurn(ctx context.Context, s *Site) (f Figures, err error) {
	u := &update{Site: s, service: s.service(s.Services), slice: s.slice(s.Services)}
	port := testbed.PodPort{Protocol: model.TCP, Port: s.updatePort()}
	u.slice.Ports[0].Port = new(int32(port.Port))
	defer func() { err = errors.Join(err, u.undo()) }()
	for _, name := range []string{oldPod, newPod} {
		if _, err := s.Bed.AddPod(ctx, testbed.PodSpec{Name: name, Ports: []testbed.PodPort{port}}); err != nil {
			return nil, err
		}
	}
	f = Figures{}
	for _, step := range u.steps() {
		took, err := u.take(ctx, step)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", step.name, err)
		}
		f[step.name] = took.Seconds()
	}
	return f, nil
}

// updateStep is a change, and what shows that it is in force.
type updateStep struct {
	name   string
	events int // that announce it
	do     func() error
	want   func(testbed.Outcome) bool
	surely int
}

func (u *update) steps() []updateStep {
	by := func(pod string) func(testbed.Outcome) bool {
		return func(o testbed.Outcome) bool { return o.Backend == pod }
	}
	gone := func(o testbed.Outcome) bool { return o.Result != testbed.Answered }
	const silence = 3 // one may be missed for another reason
	return []updateStep{
		{"service added", 2, func() error {
			u.slice.Endpoints = u.endpoint(oldPod)
			return errors.Join(u.Catalog.Add(u.service), u.Catalog.Add(u.slice))
		}, by(oldPod), 1},
		{"endpoint changed", 1, func() error { return u.become(u.endpoint(newPod)) }, by(newPod), 1},
		{"endpoint removed", 1, func() error { return u.become(nil) }, gone, silence},
		{"endpoint added", 1, func() error { return u.become(u.endpoint(oldPod)) }, by(oldPod), 1},
		{"service removed", 2, u.remove, gone, silence},
	}
}

// take makes a change when the proxy is rested, and returns how long it took until it was seen.
func (u *update) take(ctx context.Context, step updateStep) (time.Duration, error) {
	if err := u.rest(ctx); err != nil {
		return 0, err
	}
	to := u.Service(u.Services)
	v := vigil{site: u.Site, to: to, want: step.want, surely: step.surely, since: time.Now()}
	if err := step.do(); err != nil {
		return 0, err
	}
	took, err := v.await(ctx)
	if err != nil {
		return 0, u.Proxy.WithLastWords(err)
	}
	u.worked(took, step.events)
	return took, nil
}

// worked notes that the proxy has followed events, and how long that took. A proxy that gathers changes keeps the next
// one waiting. kube-proxy waits for its minSyncPeriod of a second after its work, Fairlead for a multiple of the
// change's cost.
func (s *Site) worked(took time.Duration, events int) {
	const shortest, multiple, longest = 50 * time.Millisecond, 100, 1300 * time.Millisecond
	wait := longest * time.Duration(events) // it may follow each by itself
	if s.Kind == Fairlead {
		wait = min(max(shortest, multiple*took), longest)
	}
	s.rested = time.Now().Add(wait)
}

// rest returns when the proxy has no reason to keep a change waiting.
func (s *Site) rest(ctx context.Context) error { return pause(ctx, time.Until(s.rested)) }

// endpoint is a pod.
func (u *update) endpoint(pod testbed.Place) []discoveryv1.Endpoint {
	return []discoveryv1.Endpoint{readyEndpoint(u.Bed.Addr(pod, false))}
}

// readyEndpoint is one on the node that takes connections.
func readyEndpoint(a netip.Addr) discoveryv1.Endpoint {
	return discoveryv1.Endpoint{
		Addresses: []string{a.String()}, NodeName: new(string(testbed.Node)),
		Conditions: discoveryv1.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)},
	}
}

// become replaces the endpoints.
func (u *update) become(endpoints []discoveryv1.Endpoint) error {
	u.slice = u.slice.DeepCopy() // the catalog keeps what it was given
	u.slice.Endpoints = endpoints
	return u.Catalog.Update(u.slice)
}

func (u *update) remove() error {
	err := errors.Join(u.Catalog.Delete(u.service), u.Catalog.Delete(u.slice))
	u.service = nil // it is done
	return err
}

// undo removes what a turn that was broken off has left.
func (u *update) undo() (err error) {
	if u.service != nil && u.service.ResourceVersion != "" {
		err = u.remove()
	}
	for _, name := range []string{oldPod, newPod} {
		if u.Bed.Addr(testbed.Place(name), false).IsValid() {
			err = errors.Join(err, u.Bed.RemovePod(name))
		}
	}
	return err
}
