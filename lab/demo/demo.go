// Package demo shows Services at work on this machine, and checks them. It builds a virtual cluster, brings manifests
// to life in it, and runs the real proxy on its node. Then it uses every port of every Service from every place from
// which it should work.
//
//	manifests ─► testbed/cluster ─► pods; EndpointSlices, Services ─► directory ─► "fairlead run"
//	                  │                                                               │    in a
//	                  └─► Addresses ─► trials ◄── why, and to whom ("explain") ◄──────┤    process
//	                                     │ connections                                ▼    of its own
//	                                     └──────────────────────────────────────► the node's kernel
//
// A trial is one way into a Service from one place. The manifests say what has to happen there. The proxy names its
// choice. Real connections show whether both are right.
//
// Nothing remains: namespaces and processes go with this process, however it ends, and one directory of temporary files
// goes unless it is killed.
package demo

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/cluster"
	"fairlead.dev/fairlead/said"
	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/source/file"
)

//go:embed shop.yaml
var shop []byte

const (
	manifestDir = "manifests"
	// client is the pod from which trials are made. No pod of Kubernetes has such a name.
	client testbed.Place = "a pod"
)

// Options say what to show.
type Options struct {
	Files []string // manifests: files, directories, "-" for the standard input; none: a small shop
	Proxy []string // the command that is the proxy, such as fairlead run, without flags
	Mode  string   // one of Modes; empty: the proxy's default
	Out   io.Writer
	JSON  bool // print for machines what there is to tell, at the end
	Keep  bool // let the cluster run until the context ends
	// Strict runs nothing if anything in the manifests is wrong, or probably a mistake.
	Strict bool
	// Slow is for a machine that is emulated: it makes a twentieth of the connections, waits longer for the proxy, and
	// tells no story.
	Slow bool
}

const (
	// carries is the mode in which the proxy's process carries connections.
	carries = "userspace"
	// socketwise is the mode that needs a cgroup for the cluster, or else would be for the whole machine.
	socketwise = "ebpf"
)

// Modes are those that can be shown.
func Modes() []string { return []string{"nftables", "iptables", "ipvs", socketwise, carries} }

var (
	// ErrInput is wrapped by errors about what Options.Files name.
	ErrInput = errors.New("bad input")
	// ErrFault says that something, which has been printed, was not as it should be.
	ErrFault = errors.New("not every Service did what it should")
	// ErrProxy is wrapped by the error of a proxy that does not come to serve.
	ErrProxy = errors.New("the proxy does not serve")
)

// demo is a show that runs.
type demo struct {
	Options
	text     io.Writer // for people
	dir      string
	bed      *testbed.Bed
	cluster  *cluster.Cluster
	result   *cluster.Result
	problems []cluster.Problem // of the manifests
	warnings []service.Problem // probable mistakes in them
	pod      *testbed.Pod      // client
	proxy    *proxy
	plane    string // that serves
	trials   []*trial
	faults   []string // what was not as it should be
}

// Run shows it all and removes what it has made. It returns ErrFault, an error that wraps ErrInput, or
// one that kept the demo from going on.
func Run(ctx context.Context, o Options) (err error) {
	manifests := []cluster.Manifest{{Name: "the shop", Data: shop}}
	if len(o.Files) > 0 {
		if manifests, err = cluster.Load(o.Files...); err != nil {
			return fmt.Errorf("%w: %w", ErrInput, err)
		}
	}
	d := &demo{Options: o, text: o.Out}
	if o.JSON {
		d.text = io.Discard
	}
	defer func() { err = errors.Join(err, d.close()) }()
	if d.dir, err = os.MkdirTemp("", "fairlead-demo-"); err != nil {
		return err
	}
	if d.bed, err = d.newBed(ctx); err != nil {
		return err
	}
	d.cluster = cluster.New(d.bed)
	return d.run(ctx, manifests)
}

// newBed has a cgroup if the mode needs one. Where there can be none, the proxy says so and takes another mode.
func (d *demo) newBed(ctx context.Context) (*testbed.Bed, error) {
	bed, err := testbed.New(ctx, testbed.Spec{Cgroup: d.Mode == socketwise})
	if err != nil && d.Mode == socketwise {
		return testbed.New(ctx, testbed.Spec{})
	}
	return bed, err
}

func (d *demo) close() (err error) {
	if d.proxy != nil {
		err = d.proxy.kill()
	}
	if d.bed != nil {
		err = errors.Join(err, d.bed.Close())
	}
	return errors.Join(err, os.RemoveAll(d.dir))
}

func (d *demo) run(ctx context.Context, manifests []cluster.Manifest) error {
	if err := d.apply(ctx, manifests); err != nil {
		return err
	}
	d.problems = d.result.Problems
	if err := d.check(ctx, manifests); err != nil {
		return err
	}
	if n := len(d.problems) + len(d.warnings); d.Strict && n > 0 {
		d.printProblems()
		return fmt.Errorf("nothing is run: %s, see above", said.Count(n, "problem"))
	}
	if len(d.result.Services) == 0 {
		d.printProblems()
		return fmt.Errorf("%w: there is no Service in %s", ErrInput, strings.Join(d.Files, ", "))
	}
	if err := d.play(ctx); err != nil {
		return err
	}
	if len(d.Files) == 0 && !d.Slow {
		if err := d.story(ctx, manifests[0]); err != nil {
			return err
		}
	}
	d.printFaults()
	if d.JSON {
		if err := d.printJSON(); err != nil {
			return err
		}
	}
	if d.Keep {
		d.keep(ctx)
	}
	switch {
	case len(d.faults) > 0:
		return ErrFault
	case d.invalid() > 0:
		return fmt.Errorf("%w: %s, see above", ErrInput, said.Count(d.invalid(), "problem"))
	}
	return nil
}

// check finds probable mistakes in manifests. The demo's own shop has what looks like some on purpose.
func (d *demo) check(ctx context.Context, manifests []cluster.Manifest) error {
	if len(d.Files) == 0 {
		return nil
	}
	var texts []file.Manifest
	for _, m := range manifests {
		texts = append(texts, file.Manifest{Name: m.Name, Data: m.Data})
	}
	found, err := file.Check(ctx, texts)
	about := func(object string) func(service.Problem) bool {
		return func(p service.Problem) bool { return p.Object == object && p.Cause != service.Warning }
	}
	d.problems = slices.DeleteFunc(d.problems, func(p cluster.Problem) bool { // which the other explains better
		return strings.HasPrefix(p.Reason, "json: ") && slices.ContainsFunc(found, about(p.Object))
	})
	d.warnings = slices.DeleteFunc(found, func(p service.Problem) bool {
		return slices.ContainsFunc(d.problems, func(known cluster.Problem) bool { return known.Object == p.Object })
	})
	return err
}

// invalid is how many problems the manifests have, apart from warnings.
func (d *demo) invalid() int {
	n := len(d.problems)
	for _, p := range d.warnings {
		if p.Cause != service.Warning {
			n++
		}
	}
	return n
}

// play runs the proxy, and makes and prints all trials.
func (d *demo) play(ctx context.Context) (err error) {
	if d.pod, err = d.bed.AddPod(ctx, testbed.PodSpec{Name: string(client)}); err != nil {
		return err
	}
	start := time.Now()
	if d.proxy, err = newProxy(d.bed, d.Options, d.dir); err != nil {
		return err
	}
	if err := d.proxy.start(ctx); err != nil {
		return fmt.Errorf("%w: %w", ErrProxy, err)
	}
	took := time.Since(start)
	serving, err := d.proxy.about(ctx)
	if err != nil {
		return err
	}
	d.plane = serving.Plane
	d.printStart(serving, took)
	if d.trials, err = d.plan(ctx); err != nil {
		return err
	}
	p := newTable(d.text, d.trials)
	for _, t := range d.trials {
		if err := t.run(ctx, d.bed); err != nil {
			return err
		}
		p.row(t)
		if t.fault != "" {
			d.faults = append(d.faults, fmt.Sprintf("%s: %s", t, t.fault))
		}
	}
	d.printSummary()
	return nil
}

// apply makes the cluster what the manifests say, and tells the proxy.
func (d *demo) apply(ctx context.Context, manifests []cluster.Manifest) (err error) {
	if d.result, err = d.cluster.Apply(ctx, manifests); err != nil {
		return err
	}
	return d.write()
}

// write shows the proxy the cluster as it is.
func (d *demo) write() error { return d.result.Write(filepath.Join(d.dir, manifestDir)) }

// plan says what there is to try, a Service's ways together.
func (d *demo) plan(ctx context.Context) ([]*trial, error) {
	var all []*trial
	for _, e := range d.result.Addresses {
		places := []testbed.Place{client, testbed.Node, testbed.Outside}
		if e.Kind == cluster.ClusterIP {
			places = places[:2] // the LAN has no business with it
		}
		for _, from := range places {
			t, err := d.trial(ctx, e, from)
			if err != nil {
				return nil, err
			}
			all = append(all, t)
		}
	}
	part := 1
	if d.Slow {
		part = 20
	}
	for _, t := range all {
		t.tries = max(minTries, min(perBackend*len(t.backends), maxTries, budget/len(all))) / part
	}
	return all, nil
}

func (d *demo) trial(ctx context.Context, e cluster.Address, from testbed.Place) (t *trial, err error) {
	v6 := e.To.Addr().Is6()
	t = &trial{Address: e, from: from, source: d.bed.Addr(from, v6), node: d.bed.Addr(testbed.Node, v6)}
	switch from {
	case client:
		t.iface = d.pod.Interface
	case testbed.Outside:
		t.iface = "eth0"
	}
	t.spec = d.service(e.Service)
	t.warned = slices.ContainsFunc(d.warnings, func(p service.Problem) bool { return p.Object == "Service "+e.Service })
	for _, p := range d.result.Pods {
		t.here = t.here || p.Node == testbed.Node && slices.ContainsFunc(e.Backends, func(b cluster.Backend) bool {
			return b.Place == p.Place
		})
	}
	if t.want, err = d.proxy.explain(ctx, t); err != nil {
		return nil, err
	}
	t.backends = map[string]service.Chance{}
	for _, b := range t.want.Backends {
		t.backends[d.podAt(e, b.Backend)] = b
	}
	t.pods = slices.Collect(maps.Keys(t.backends))
	for _, b := range e.Backends {
		t.pods = append(t.pods, b.Place)
	}
	slices.Sort(t.pods)
	t.pods = slices.Compact(t.pods)
	return t, nil
}

func (d *demo) service(name string) *corev1.Service {
	i := slices.IndexFunc(d.result.Services, func(s *corev1.Service) bool { return s.Namespace+"/"+s.Name == name })
	return d.result.Services[i]
}

// podAt is the pod that answers at an address and port, or these if none does.
func (d *demo) podAt(e cluster.Address, text string) string {
	for _, b := range e.Backends {
		if b.Addr.String() == text && b.Place != "" {
			return b.Place
		}
	}
	for _, p := range d.result.Pods { // one that is not ready
		if addr, err := netip.ParseAddrPort(text); err == nil && slices.Contains(p.Addrs, addr.Addr()) {
			return p.Place
		}
	}
	return text
}
