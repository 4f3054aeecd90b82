// Package kubernetes is a real control plane for a testbed: etcd, kube-apiserver and kube-controller-manager, built
// from their modules, run beside the test. The nodes, their kubelets and the scheduler are virtual. A service proxy
// sees the same as of any cluster.
//
//	         client-go, kubectl                                 ┌ testbed.Bed ─────────────────────┐
//	                 │                  ┌─ Relay 192.0.2.254 ───┼─► proxy on node (StartProxy)     │
//	                 ▼                  │  Cut, Hang, Slow      │                                  │
//	etcd ◄── kube-apiserver ◄───────────┤                       │                                  │
//	  ▲              ▲                  └─ Kubelet: binds, ─────┼─► pods: namespaces with servers  │
//	Store      kube-controller-         runs, reports, drains   └──────────────────────────────────┘
//	(unchecked)  manager: slices, …
//
// One ControlPlane may serve several beds. Programs that it starts die with this process, even when that is killed.
// Parts has the origin of the programs and the cost of building them.
package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"fairlead.dev/fairlead/lab/testbed"
)

// Options say what a control plane runs. The zero Options are a whole one.
type Options struct {
	// Parts are the programs; the zero Parts are found or built.
	Parts Parts
	// Controllers are those of kube-controller-manager; nil: DefaultControllers; empty: none runs.
	Controllers []string
	// APIServerArgs are appended to those of kube-apiserver.
	APIServerArgs []string
}

// DefaultControllers are those that bring workloads and their EndpointSlices to life.
func DefaultControllers() []string {
	return []string{
		"deployment-controller", "replicaset-controller", "endpointslice-controller",
		"endpointslice-mirroring-controller", "disruption-controller", "namespace-controller",
		"garbage-collector-controller", "serviceaccount-controller",
	}
}

// ControlPlane is a running control plane. Its methods may be called concurrently, but for those that
// stop and start its programs.
type ControlPlane struct {
	parts     Parts
	dir       *scratch
	extraArgs []string // of kube-apiserver
	ports     *reservedPort
	authority *authority

	etcd, apiServer, controllers *program

	admin  *rest.Config
	client *kubernetes.Clientset
	store  *etcdClient

	mu     sync.Mutex
	relays []*Relay
}

// startPatience is how long a program may take to become ready, on a machine that does much else.
const startPatience = 2 * time.Minute

// Start starts a control plane and returns when the API server is ready. The caller must Close it.
func Start(ctx context.Context, o Options) (*ControlPlane, error) {
	if o.Parts.Dir == "" {
		parts, err := BuildParts(ctx)
		if err != nil {
			return nil, err
		}
		o.Parts = parts
	}
	c := &ControlPlane{parts: o.Parts, extraArgs: o.APIServerArgs}
	err := c.prepare(o)
	if err == nil {
		err = c.startAll(ctx)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("control plane: %w", err), c.Close())
	}
	return c, nil
}

// prepare makes all that the programs need to start.
func (c *ControlPlane) prepare(o Options) (err error) {
	if c.dir, err = newScratch(); err != nil {
		return err
	}
	if c.ports, err = reservePort(); err != nil {
		return err
	}
	if c.authority, err = newAuthority(c.dir.path, servingAddrs()); err != nil {
		return err
	}
	if c.admin, err = c.configFor(Admin()); err != nil {
		return err
	}
	c.admin.QPS = -1 // no limit
	if c.client, err = kubernetes.NewForConfig(c.admin); err != nil {
		return err
	}
	c.store = newEtcdClient(c.path(etcdSocket))
	if _, err := c.Kubeconfig(c.dir.path, Admin()); err != nil {
		return err
	}
	return c.describe(o)
}

// describe writes the programs' files and command lines.
func (c *ControlPlane) describe(o Options) error {
	c.etcd = c.program("etcd", c.etcdArgs()...)
	c.apiServer = c.program("kube-apiserver", c.apiServerArgs()...)
	if o.Controllers == nil {
		o.Controllers = DefaultControllers()
	}
	if len(o.Controllers) == 0 {
		return nil
	}
	const config = "kube-controller-manager.kubeconfig"
	manager := User{Name: "system:kube-controller-manager", Groups: Admin().Groups} // all its controllers in one
	if err := c.writeKubeconfig(c.path(config), c.hostURL(), manager); err != nil {
		return err
	}
	c.controllers = c.program("kube-controller-manager",
		"--kubeconfig="+c.path(config), "--controllers="+strings.Join(o.Controllers, ","), "--leader-elect=false",
		"--secure-port=0", "--service-account-private-key-file="+c.path(serviceAccountKey),
		"--kube-api-qps=1000", "--kube-api-burst=1000")
	return nil
}

func (c *ControlPlane) program(name string, args ...string) *program {
	return &program{path: c.parts.Path(name), dir: c.dir.path, args: args}
}

const (
	etcdSocket        = "etcd.sock"
	serviceAccountKey = "service-account.key"
)

// StoreDir is where etcd keeps its data.
func (c *ControlPlane) StoreDir() string { return c.path("etcd") }

func (c *ControlPlane) etcdArgs() []string {
	client, peer := "unix://"+c.path(etcdSocket), "unix://"+c.path("peer.sock")
	return []string{
		"--data-dir=" + c.StoreDir(), "--unsafe-no-fsync", "--quota-backend-bytes=8589934592",
		"--listen-client-urls=" + client, "--advertise-client-urls=" + client,
		"--listen-peer-urls=" + peer, "--initial-advertise-peer-urls=" + peer,
		"--initial-cluster=default=" + peer, "--log-level=warn",
	}
}

func (c *ControlPlane) apiServerArgs() []string {
	var cidrs []string
	for _, p := range testbed.ServiceCIDRs() {
		cidrs = append(cidrs, p.String())
	}
	return append([]string{
		"--etcd-servers=unix://" + c.path(etcdSocket),
		"--bind-address=127.0.0.1", fmt.Sprintf("--secure-port=%d", c.ports.port), "--permit-port-sharing",
		"--tls-cert-file=" + c.path("serving.crt"), "--tls-private-key-file=" + c.path("serving.key"),
		"--client-ca-file=" + c.path("ca.crt"), "--anonymous-auth=false", "--authorization-mode=RBAC",
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file=" + c.path(serviceAccountKey),
		"--service-account-signing-key-file=" + c.path(serviceAccountKey),
		"--service-cluster-ip-range=" + strings.Join(cidrs, ","),
		// The Service "kubernetes" is reachable where a Relay listens; its endpoints are ours to write.
		"--advertise-address=" + relayAddr(false).Addr().String(), "--endpoint-reconciler-type=none",
		// Pods need no tokens and nodes are never tainted: no component would mount the one or remove the other.
		"--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
		"--allow-privileged", "--profiling=false", "--kubelet-preferred-address-types=" + string(kubeletAddress),
	}, c.extraArgs...)
}

func (c *ControlPlane) startAll(ctx context.Context) error {
	if err := c.StartEtcd(ctx); err != nil {
		return err
	}
	if err := c.StartAPIServer(ctx); err != nil {
		return err
	}
	if c.controllers == nil {
		return nil
	}
	return c.controllers.start()
}

// StartEtcd starts etcd, with the data that it had.
func (c *ControlPlane) StartEtcd(ctx context.Context) error {
	return c.etcd.startReady(ctx, c.store.healthy)
}

// StopEtcd stops etcd: by SIGTERM, and as a kubelet does by SIGKILL after a while, or with kill at once.
func (c *ControlPlane) StopEtcd(kill bool) error { return c.etcd.stop(kill) }

// StartAPIServer starts the API server at the address where it was, and returns when it is ready.
func (c *ControlPlane) StartAPIServer(ctx context.Context) error {
	return c.apiServer.startReady(ctx, func(ctx context.Context) error {
		return c.client.Discovery().RESTClient().Get().AbsPath("/readyz").Timeout(5 * time.Second).Do(ctx).Error()
	})
}

// StopAPIServer stops the API server: by SIGTERM, and as a kubelet does by SIGKILL after a while, or with
// kill at once.
func (c *ControlPlane) StopAPIServer(kill bool) error { return c.apiServer.stop(kill) }

// APIServerUsage is of the API server that runs.
func (c *ControlPlane) APIServerUsage() (Usage, error) { return usageOf(c.apiServer.cmd.Process.Pid) }

// StartControllers starts kube-controller-manager again.
func (c *ControlPlane) StartControllers() error { return c.controllers.start() }

// StopControllers stops kube-controller-manager: in order, or with kill by SIGKILL. Until it is started
// again EndpointSlices stay as they are.
func (c *ControlPlane) StopControllers(kill bool) error { return c.controllers.stop(kill) }

// Config is an administrator's, without limit of queries. It works in the namespace of this process;
// see Relay.Kubeconfig for programs in a Bed.
func (c *ControlPlane) Config() *rest.Config { return rest.CopyConfig(c.admin) }

// Client is an administrator's.
func (c *ControlPlane) Client() *kubernetes.Clientset { return c.client }

func (c *ControlPlane) path(name string) string { return filepath.Join(c.dir.path, name) }

// hostAddr is the API server's address outside of all beds.
func (c *ControlPlane) hostAddr() netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), c.ports.port)
}

func (c *ControlPlane) hostURL() string { return "https://" + c.hostAddr().String() }

// Close kills all programs, ends all relays and removes what is temporary.
func (c *ControlPlane) Close() error {
	c.mu.Lock()
	relays := c.relays
	c.relays = nil
	c.mu.Unlock()
	for _, r := range relays {
		r.Close()
	}
	var errs []error
	for _, p := range []*program{c.controllers, c.apiServer, c.etcd} {
		if p != nil {
			errs = append(errs, p.stop(true))
		}
	}
	if c.ports != nil {
		c.ports.release()
	}
	if c.dir != nil {
		errs = append(errs, c.dir.remove())
	}
	return errors.Join(errs...)
}
