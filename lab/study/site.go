package study

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
)

// The pods of a site. Each of the server's ports, at each of its addresses, is a backend of its own.
const (
	ClientPod testbed.Place = "client"
	ServerPod testbed.Place = "server"
)

// Site is a virtual cluster whose node has a contender's proxy, or none.
//
//	client ── node: the proxy ── server, which has all backends' addresses
//	            ▲
//	         Catalog: the API server that it follows
type Site struct {
	Contender
	Cluster
	Bed *testbed.Bed
	// Catalog and Proxy are nil where there is no proxy. Experiments that announce something take it back.
	Catalog *kubernetes.Catalog
	Proxy   *kubernetes.Proxy
	// Start is how long it took until the proxy was ready and Services answered.
	Start time.Duration
	// KernelMemory is by how much the kernel's memory grew meanwhile, in bytes, see KernelMemory.
	KernelMemory int64
	// ControlSocket is Fairlead's; empty for others.
	ControlSocket string
	// Kernel is the name of the one that the site is in.
	Kernel string

	workers workers
	rested  time.Time // see rest
	updates int       // see updatePort

	dir     string   // of the kubeconfig and the control socket
	program []string // is Fairlead
	command []string // starts the proxy
	failed  error    // why there is nothing of all this
}

// How long a proxy may take until all Services answer; the shorter one is for one endpoint.
const (
	startLimit = 2 * time.Minute
	tryLimit   = 20 * time.Second
)

// limit is that of the site's proxy.
func (s *Site) limit() time.Duration {
	if s.Services*s.Endpoints <= 1 {
		return tryLimit
	}
	return startLimit
}

// Proxied reports whether there is a proxy.
func (s *Site) Proxied() bool { return s.Kind == Fairlead || s.Kind == Peer }

// newSite makes one. If it cannot be made, that is what it says.
func (l *lab) newSite(ctx context.Context, who Contender, c Cluster, catalog *kubernetes.Catalog) *Site {
	s := &Site{Contender: who, Cluster: c, Kernel: l.kernel}
	if err := s.build(ctx, catalog, l.Program); err != nil {
		s.fail(fmt.Errorf("%s with %d Services: %w", who.Name, c.Services, err))
	}
	return s
}

// fail removes all of it.
func (s *Site) fail(err error) { s.failed = errors.Join(err, s.close()) }

func (s *Site) build(ctx context.Context, catalog *kubernetes.Catalog, program []string) (err error) {
	spec := testbed.Spec{Pods: []testbed.PodSpec{{Name: string(ClientPod)}, {Name: string(ServerPod)}}, Cgroup: true}
	s.Bed, err = testbed.New(ctx, spec)
	if err != nil && s.Plane != ebpfPlane { // no other plane needs the cgroup
		spec.Cgroup = false
		s.Bed, err = testbed.New(ctx, spec)
	}
	if err != nil {
		return err
	}
	if err := errors.Join(s.spread(ServerPod, backendRange()), s.spread(ClientPod, clientRange())); err != nil {
		return fmt.Errorf("addresses of the backends and of the clients: %w", err)
	}
	if err := s.answerProbes(); err != nil {
		return err
	}
	if !s.Proxied() {
		return nil
	}
	return s.startProxy(ctx, catalog, program)
}

// spread makes all of a range a pod's own.
func (s *Site) spread(pod testbed.Place, addrs netip.Prefix) error {
	all, err := netlink.ParseIPNet(addrs.String())
	if err != nil {
		return err
	}
	via := s.Bed.Addr(pod, false)
	err = s.Bed.Do(testbed.Node, func() error {
		return netlink.RouteAdd(&netlink.Route{
			Dst: all, Gw: via.AsSlice(), Flags: int(netlink.FLAG_ONLINK), LinkIndex: s.cable(via),
		})
	})
	if err != nil {
		return err
	}
	return s.Bed.Do(pod, func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{
			Dst: all, LinkIndex: lo.Attrs().Index, Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST,
		})
	})
}

// cable is the node's interface to an address; the calling thread is on the node.
func (s *Site) cable(to netip.Addr) int {
	routes, err := netlink.RouteGet(to.AsSlice())
	if err != nil || len(routes) == 0 {
		return 0
	}
	return routes[0].LinkIndex
}

func (s *Site) startProxy(ctx context.Context, catalog *kubernetes.Catalog, program []string) (err error) {
	s.Catalog = catalog.Copy()
	if s.dir, err = os.MkdirTemp("", "fairlead-bench-"); err != nil {
		return err
	}
	kubeconfig, err := s.Catalog.Serve(s.Bed, s.dir)
	if err != nil {
		return err
	}
	if err := s.prepareCommand(program, kubeconfig); err != nil {
		return err
	}
	before, _ := KernelMemory() // what the machine does not tell stays 0
	s.Start, err = s.start(ctx, s.await)
	if err != nil {
		return err
	}
	after, _ := KernelMemory()
	s.KernelMemory = after - before
	return nil
}

// prepareCommand finds what starts the proxy.
func (s *Site) prepareCommand(program []string, kubeconfig string) (err error) {
	args := kubernetes.ProxyArgs(kubeconfig, s.mode())
	if s.Kind == Peer {
		s.command = slices.Concat([]string{s.Program}, args, s.Args)
		return nil
	}
	s.program, s.ControlSocket = program, filepath.Join(s.dir, "control")
	s.command = slices.Concat(program, []string{"run", "--control-socket=" + s.ControlSocket}, args)
	if backend := s.backend(); backend != "" {
		s.command = append(s.command, "--iptables-backend="+backend)
	}
	pins := filepath.Join(s.dir, "bpf")
	if err = s.Bed.MountBPFFS(pins); err == nil && s.Bed.Cgroup() != "" { // a contender may change to that plane
		s.command = append(s.command, "--cgroup-root="+s.Bed.Cgroup(), "--bpf-root="+pins)
	} else if s.Plane == ebpfPlane {
		return err
	}
	s.command = append(s.command, s.Args...)
	return nil
}

// start starts the proxy, which does not run, and returns how long it took until ready returned.
func (s *Site) start(ctx context.Context, ready func(context.Context) error) (took time.Duration, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, s.limit(), fmt.Errorf("it is not ready after %s", s.limit()))
	defer cancel()
	env, err := s.environment()
	if err != nil {
		return 0, err
	}
	// Its legacy iptables belong to its namespace, and must not wait for changes of the machine's.
	env = slices.Concat(env, []string{"XTABLES_LOCKFILE=" + filepath.Join(s.dir, "xtables.lock")})
	o := kubernetes.ProxyOptions{Bed: s.Bed, Command: s.command, Env: env}
	begin := time.Now()
	// The proxy outlives what starts it.
	if s.Proxy, err = kubernetes.StartProxy(context.WithoutCancel(ctx), o); err != nil {
		return 0, err
	}
	if err := ready(ctx); err != nil {
		return 0, err
	}
	return time.Since(begin), nil
}

// restart kills the proxy, whose rules stay, and starts it anew.
func (s *Site) restart(ctx context.Context, ready func(context.Context) error) (took time.Duration, err error) {
	if err := s.Proxy.Kill(); err != nil {
		return 0, err
	}
	return s.start(ctx, ready)
}

// await returns when the proxy is ready, and all Services of a sample answer.
func (s *Site) await(ctx context.Context) error {
	const sample = 20
	for j := range sample {
		if i := j * (s.Services - 1) / (sample - 1); s.Endpoints > 0 {
			if err := s.awaitAnswer(ctx, s.Service(i)); err != nil {
				return err
			}
		}
	}
	return s.Proxy.Ready(ctx)
}

// awaitAnswer returns when a Service leads to the testbed's own server.
func (s *Site) awaitAnswer(ctx context.Context, to netip.AddrPort) error {
	probe := testbed.Probe{From: ClientPod, To: to, Timeout: 50 * time.Millisecond}
	return s.Proxy.Await(ctx, to.String()+" does not answer", func(ctx context.Context) (bool, error) {
		o, err := s.Bed.Probe(ctx, probe)
		return err == nil && o.Result == testbed.Answered, nil
	})
}

// close removes all of it.
func (s *Site) close() (err error) {
	err = s.closeWorkers()
	if s.Proxy != nil {
		err = errors.Join(err, s.Proxy.Kill())
	}
	if s.Catalog != nil && s.dir != "" {
		err = errors.Join(err, s.Catalog.Close(), os.RemoveAll(s.dir))
	}
	if s.Bed != nil {
		err = errors.Join(err, s.Bed.Close())
	}
	*s = Site{Contender: s.Contender, Cluster: s.Cluster, Kernel: s.Kernel, failed: s.failed}
	return err
}
