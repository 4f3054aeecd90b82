package sidebyside

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubeproxyconfig "k8s.io/kube-proxy/config/v1alpha1"
	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/lab/conformance"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
)

// pair is kube-proxy and Fairlead with the same configuration.
type pair struct {
	mode         string
	setup        setup // both proxies'
	theirs, ours *node
}

// node is a cluster whose node has a proxy.
type node struct {
	bed     *testbed.Bed
	relay   *kubernetes.Relay
	command []string // to which the configuration's name is appended
	dir     string
	proxy   *kubernetes.Proxy // nil: it does not run
}

// setup is what a seed says of the proxies' configuration, apart from the mode.
type setup struct {
	nodePortAddresses []string
	detectLocalMode   kubeproxyconfig.LocalMode
	masqueradeAll     bool
}

// How kube-proxy may tell pods from others.
const (
	clusterCIDR     kubeproxyconfig.LocalMode = "ClusterCIDR"
	nodeCIDR        kubeproxyconfig.LocalMode = "NodeCIDR"
	interfacePrefix kubeproxyconfig.LocalMode = "InterfaceNamePrefix"
)

func (g generator) setup() setup {
	s := setup{
		nodePortAddresses: pick(g, nil, nil, []string{"192.0.2.0/28", "fd00::/96"}, []string{"0.0.0.0/0", "::/0"},
			[]string{"192.0.2.101/32"}),
		detectLocalMode: pick(g, clusterCIDR, clusterCIDR, nodeCIDR, interfacePrefix),
		masqueradeAll:   g.chance(15),
	}
	return s
}

// config is the file that both proxies of a pair read.
func (s setup) config(mode, kubeconfig string) ([]byte, error) {
	c := kubeproxyconfig.KubeProxyConfiguration{Mode: kubeproxyconfig.ProxyMode(mode)}
	c.APIVersion, c.Kind = kubeproxyconfig.SchemeGroupVersion.String(), "KubeProxyConfiguration"
	c.HostnameOverride = string(testbed.Node)
	c.ClientConnection.Kubeconfig = kubeconfig
	c.ClusterCIDR = testbed.ClusterCIDR()
	c.NodePortAddresses, c.DetectLocalMode = s.nodePortAddresses, s.detectLocalMode
	if c.DetectLocalMode == interfacePrefix {
		c.DetectLocal.InterfaceNamePrefix = "cali"
	}
	c.IPTables.MasqueradeAll, c.NFTables.MasqueradeAll = s.masqueradeAll, s.masqueradeAll
	soon := metav1.Duration{Duration: 20 * time.Millisecond}
	c.IPTables.MinSyncPeriod, c.NFTables.MinSyncPeriod = soon, soon
	// The machine's settings are left as they are.
	c.OOMScoreAdj = new(int32)
	c.Conntrack.MaxPerCore, c.Conntrack.Min = new(int32), new(int32)
	never := &metav1.Duration{}
	c.Conntrack.TCPEstablishedTimeout, c.Conntrack.TCPCloseWaitTimeout = never, never
	return yaml.Marshal(c)
}

func (n *node) start(ctx context.Context, s setup, mode string) error {
	kubeconfig, err := n.relay.Kubeconfig(n.dir, kubernetes.KubeProxy())
	if err != nil {
		return err
	}
	text, err := s.config(mode, kubeconfig)
	if err != nil {
		return err
	}
	name := filepath.Join(n.dir, "config.conf")
	if err := os.WriteFile(name, text, 0o600); err != nil {
		return err
	}
	n.proxy, err = kubernetes.StartProxy(ctx, kubernetes.ProxyOptions{
		Bed: n.bed, Command: append(slices.Clone(n.command), "--config="+name),
	})
	return err
}

// restart starts the proxy over what the one before has left.
func (n *node) restart(ctx context.Context, s setup, mode string) error {
	if err := n.stop(); err != nil {
		return err
	}
	return n.start(context.WithoutCancel(ctx), s, mode)
}

// stop kills the proxy, so that it leaves its rules.
func (n *node) stop() error {
	if n.proxy == nil {
		return nil
	}
	return n.proxy.Kill()
}

// log is what the proxy has said.
func (n *node) log() string {
	if n.proxy == nil {
		return ""
	}
	return n.proxy.Log()
}

// newNode is a cluster on whose node a program shall run.
func newNode(t *testing.T, plane *kubernetes.ControlPlane, command ...string) *node {
	bed, err := conformance.NewBed(t.Context(), false)
	if err != nil {
		t.Fatal(err)
	}
	relay, err := plane.Serve(bed)
	if err != nil {
		t.Fatal(err)
	}
	n := &node{bed: bed, relay: relay, command: command, dir: t.TempDir()}
	t.Cleanup(func() {
		if err := errors.Join(n.stop(), bed.Close()); err != nil {
			t.Error(err)
		}
		if t.Failed() && testing.Verbose() {
			t.Logf("%s:\n%s", command, n.log())
		}
	})
	return n
}

// each does something with all nodes at the same time.
func each(ctx context.Context, pairs []*pair, do func(ctx context.Context, p *pair, n *node) error) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, p := range pairs {
		for _, n := range []*node{p.theirs, p.ours} {
			group.Go(func() error {
				if err := do(ctx, p, n); err != nil {
					return fmt.Errorf("%s in mode %s: %w; its last words:\n%s", filepath.Base(n.command[0]), p.mode, err, tail(n.log()))
				}
				return nil
			})
		}
	}
	return group.Wait()
}

func tail(log string) string { return log[max(0, len(log)-3000):] }
