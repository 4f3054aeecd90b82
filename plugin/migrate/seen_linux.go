package migrate

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/daemon"
	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/plugin/ask"
	"fairlead.dev/fairlead/source/kube"
	"fairlead.dev/fairlead/takeover"
)

// ConfigMaps that tell what serves.
const (
	kubeProxyConfig = "kube-system/kube-proxy"
	ciliumConfig    = "kube-system/cilium-config"
	istioConfig     = "istio-system/istio"
	nodeCacheConfig = "kube-system/node-local-dns"
)

// seen is what was found of the proxy that serves, and of the objects that it serves.
type seen struct {
	Report
	config     *config.Config // nil: not found
	configured string         // the mode of the Fairlead that runs, which may serve by another
	invalid    []string       // errors in config
	services   []corev1.Service
	nodes      []corev1.Node
	maps       map[string]*corev1.ConfigMap // by namespace/name
	leftovers  []takeover.Leftover
	foreign    []string       // rules of others that match what kube-proxy's mode ipvs has
	schedulers map[string]int // of virtual servers in the kernel
}

// look reads what there is. Without manifests that is this node.
func look(ctx context.Context, i *ask.Inspection, to string) (*seen, error) {
	s := &seen{maps: map[string]*corev1.ConfigMap{}, schedulers: map[string]int{}}
	s.To = to
	var err error
	if i.IsOffline() {
		err = s.readManifests(i.Flags.Lookup("manifests").Value.(interface{ GetSlice() []string }).GetSlice())
	}
	if err == nil {
		err = s.findConfig(i)
	}
	if err != nil {
		return nil, cli.Misused(err)
	}
	if !i.IsOffline() {
		s.askCluster(ctx, i)
	}
	if s.config == nil && len(s.invalid) == 0 {
		err = s.loadMap()
	}
	if err == nil && !i.IsOffline() {
		err = s.lookAtNode(ctx, i)
	}
	s.conclude()
	return s, cli.Failed(err)
}

// conclude names proxy and mode, and proposes a mode.
func (s *seen) conclude() {
	if s.config != nil {
		s.Node = s.config.KubeProxy.HostnameOverride
		if s.Proxy == "" {
			s.Proxy, s.Mode = "kube-proxy", string(s.config.KubeProxy.Mode)
		}
	}
	if s.Proxy == "" && s.ciliumReplaces() {
		s.Proxy, s.Mode, s.By = "Cilium", "cilium", append(s.By, "ConfigMap "+ciliumConfig)
	}
	if s.Proxy == "" {
		s.Proxy, s.By = "an unknown proxy", append(s.By, "nothing")
		s.Unread = append(s.Unread, "the settings of the proxy: name its file by --config")
	}
	for _, n := range s.nodes {
		older := s.Kernel == "" || before(n.Status.NodeInfo.KernelVersion, s.Kernel)
		if n.Status.NodeInfo.OperatingSystem != "windows" && older && (s.Node == "" || n.Name == s.Node) {
			s.Kernel = n.Status.NodeInfo.KernelVersion
		}
	}
	if s.To == "" && before(s.Kernel, "5.13") { // as docs/choosing.md has it
		s.To = "iptables"
	}
	s.To = cmp.Or(s.To, "nftables")
}

// ciliumReplaces reports whether Cilium serves in place of kube-proxy.
func (s *seen) ciliumReplaces() bool {
	m := s.maps[ciliumConfig]
	return m != nil && slices.Contains([]string{"true", "strict", "partial"}, m.Data["kube-proxy-replacement"])
}

// before reports whether a kernel is of an earlier release than another one, as far as that is known.
func before(kernel, other string) bool {
	var a, b [2]int
	_, err := fmt.Sscanf(kernel, "%d.%d", &a[0], &a[1])
	_, _ = fmt.Sscanf(other, "%d.%d", &b[0], &b[1])
	return err == nil && slices.Compare(a[:], b[:]) < 0
}

// findConfig takes the configuration that --config names, or else that of a process here.
func (s *seen) findConfig(i *ask.Inspection) error {
	if i.Flags.Config != "" || i.Flags.Lookup("proxy-mode").Changed {
		s.By = append(s.By, "flags")
		return s.load(i.Flags)
	}
	if i.IsOffline() {
		return nil
	}
	pid, args, err := findProcess()
	if err != nil || pid == 0 {
		return err
	}
	flags := daemon.NewFlags()
	set := pflag.NewFlagSet("kube-proxy", pflag.ContinueOnError)
	set.ParseErrorsAllowlist.UnknownFlags = true // the release of kube-proxy is not known
	flags.AddTo(set)
	if err := set.Parse(args); err != nil {
		s.invalid = append(s.invalid, err.Error())
	}
	root := fmt.Sprintf("/proc/%d/root", pid) // it may be in a container
	if flags.Config != "" {
		flags.Config = filepath.Join(root, flags.Config)
	}
	s.By = append(s.By, fmt.Sprintf("process %d", pid))
	err = s.load(flags)
	if s.config != nil && s.config.KubeProxy.ClientConnection.Kubeconfig != "" {
		k := &s.config.KubeProxy.ClientConnection
		k.Kubeconfig = filepath.Join(root, k.Kubeconfig)
	}
	return err
}

// load notes what is wrong with a configuration. It fails if there is no file.
func (s *seen) load(flags *config.Flags) error {
	c, err := flags.Load()
	if errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err != nil {
		s.invalid = append(s.invalid, strings.Split(err.Error(), "\n")...)
	}
	s.config = c
	return nil
}

// loadMap takes the configuration in kubeadm's ConfigMap.
func (s *seen) loadMap() error {
	m := s.maps[kubeProxyConfig]
	if m == nil {
		return nil
	}
	flags := daemon.NewFlags()
	flags.Config = "ConfigMap " + kubeProxyConfig
	flags.Read = func(string) ([]byte, error) { return []byte(m.Data["config.conf"]), nil }
	s.By = append(s.By, flags.Config)
	return s.load(flags)
}

// askCluster reads Services and ConfigMaps from the API server of the configuration.
func (s *seen) askCluster(ctx context.Context, i *ask.Inspection) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	options := kube.ClientOptions{Log: daemon.NewLogs(io.Discard).Logger()}
	if s.config != nil {
		options.Kubeconfig = s.config.KubeProxy.ClientConnection.Kubeconfig
	}
	if own := i.Flags.Lookup("kubeconfig"); own.Changed {
		options.Kubeconfig = own.Value.String()
	}
	client, err := kube.Connect(options)
	if err == nil {
		s.services, err = client.Services(ctx)
	}
	if err != nil {
		s.Unread = append(s.Unread, "Services: "+strings.ReplaceAll(err.Error(), "\n", " "))
		return
	}
	for _, name := range []string{kubeProxyConfig, ciliumConfig, istioConfig, nodeCacheConfig} {
		namespace, of, _ := strings.Cut(name, "/")
		if m, err := client.ConfigMap(ctx, namespace, of); err == nil {
			s.maps[name] = m
		}
	}
}

// readManifests reads what "kubectl get services,nodes,configmaps -A -o yaml" has written, or single manifests.
func (s *seen) readManifests(paths []string) error {
	for _, path := range paths {
		err := filepath.WalkDir(path, func(name string, d fs.DirEntry, err error) error {
			other := name != path && !slices.Contains([]string{".yaml", ".yml", ".json"}, filepath.Ext(name))
			if err != nil || d.IsDir() || other {
				return err
			}
			text, err := os.ReadFile(name)
			for doc := range bytes.SplitSeq(text, []byte("\n---")) {
				if err == nil {
					err = s.readObject(doc, "")
				}
			}
			if err != nil {
				err = fmt.Errorf("%s: %w", name, err)
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	s.By = append(s.By, "--manifests")
	return nil
}

// readObject reads an object, or those of a List, which may say for them of what kind they are.
func (s *seen) readObject(text []byte, kind string) (err error) {
	var head struct {
		metav1.TypeMeta `json:",inline"`
		Items           []json.RawMessage `json:"items"`
	}
	if err := yaml.Unmarshal(text, &head); err != nil {
		return err
	}
	switch cmp.Or(head.Kind, kind) {
	case "Service":
		s.services = append(s.services, corev1.Service{})
		err = yaml.Unmarshal(text, &s.services[len(s.services)-1])
	case "Node":
		s.nodes = append(s.nodes, corev1.Node{})
		err = yaml.Unmarshal(text, &s.nodes[len(s.nodes)-1])
	case "ConfigMap":
		m := &corev1.ConfigMap{}
		err = yaml.Unmarshal(text, m)
		s.maps[m.Namespace+"/"+m.Name] = m
	default:
		for _, item := range head.Items {
			err = errors.Join(err, s.readObject(item, strings.TrimSuffix(head.Kind, "List")))
		}
	}
	return err
}
