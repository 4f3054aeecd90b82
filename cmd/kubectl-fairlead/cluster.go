package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	core "k8s.io/client-go/kubernetes/typed/core/v1"
	_ "k8s.io/client-go/plugin/pkg/client/auth" // as kubectl has them: kubeconfigs name them
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/streaming/pkg/httpstream"

	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/programs"
)

// cluster is where the agents are.
type cluster struct {
	loading   *clientcmd.ClientConfigLoadingRules
	overrides clientcmd.ConfigOverrides
	nodes     []string // that are asked; none: all
	place     string   // the namespace of the agents
	selector  string   // of their pods; empty: one of selectors

	config *rest.Config
	client *core.CoreV1Client
}

// selectors find the pods of the chart, or else those of kubeadm's DaemonSet with the agent's image.
var selectors = []string{"app.kubernetes.io/name in (fairlead, fairlead-windows)", "k8s-app=kube-proxy"}

// addTo adds the flags of kubectl that say which cluster is meant, and those that choose agents.
func (k *cluster) addTo(f *pflag.FlagSet) {
	k.loading = clientcmd.NewDefaultClientConfigLoadingRules()
	f.StringVar(&k.loading.ExplicitPath, clientcmd.RecommendedConfigPathFlag, "", "the kubeconfig `file`")
	clientcmd.BindOverrideFlags(&k.overrides, f, clientcmd.RecommendedConfigOverrideFlags(""))
	f.StringSliceVar(&k.nodes, "node", nil, "ask the agent of this node only (repeatable)")
	f.StringVar(&k.place, "agent-namespace", "kube-system", "the namespace of the agents' pods")
	f.StringVar(&k.selector, "agent-selector", "",
		"the label selector of the agents' pods (default: "+strings.Join(selectors, ", else ")+")")
}

// agent is a pod that serves a node.
type agent struct {
	node, pod, container string
	windows              bool
}

// agents are those of the nodes that are asked, by the names of the nodes.
func (k *cluster) agents(ctx context.Context) (all []agent, err error) {
	if err := k.connect(); err != nil {
		return nil, err
	}
	list := &corev1.PodList{}
	for _, selector := range selectors {
		o := metav1.ListOptions{LabelSelector: cmp.Or(k.selector, selector)}
		if list, err = k.client.Pods(k.place).List(ctx, o); err != nil {
			return nil, cli.Failed(err)
		}
		if len(list.Items) > 0 {
			break
		}
	}
	var nodes []string
	for _, p := range list.Items {
		if p.Spec.NodeName == "" || p.DeletionTimestamp != nil {
			continue
		}
		nodes = append(nodes, p.Spec.NodeName)
		if len(k.nodes) == 0 || slices.Contains(k.nodes, p.Spec.NodeName) {
			container := cmp.Or(p.Annotations["kubectl.kubernetes.io/default-container"], p.Spec.Containers[0].Name)
			windows := p.Spec.OS != nil && p.Spec.OS.Name == corev1.Windows
			all = append(all, agent{p.Spec.NodeName, p.Name, container, windows})
		}
	}
	for _, name := range k.nodes {
		if !slices.Contains(nodes, name) {
			slices.Sort(nodes)
			return nil, cli.Misused(fmt.Errorf("--node %s: no agent is there, but on: %s", name, strings.Join(nodes, ", ")))
		}
	}
	if len(all) == 0 {
		return nil, cli.Failed(fmt.Errorf("no agent is in namespace %s; --agent-namespace and --agent-selector say where "+
			"they are", k.place))
	}
	slices.SortFunc(all, func(a, b agent) int { return cmp.Or(cmp.Compare(a.node, b.node), cmp.Compare(a.pod, b.pod)) })
	return all, nil
}

func (k *cluster) connect() (err error) {
	loaded := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(k.loading, &k.overrides)
	if k.config, err = loaded.ClientConfig(); err != nil {
		return cli.Misused(err)
	}
	k.config.QPS, k.config.Burst = 50, 100
	k.client, err = core.NewForConfig(k.config)
	return cli.Failed(err)
}

// named is the name of a Service with its namespace: if it has none, the one that kubectl would use.
func (k *cluster) named(service string) (string, error) {
	if strings.Contains(service, "/") {
		return service, nil
	}
	loaded := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(k.loading, &k.overrides)
	namespace, _, err := loaded.Namespace()
	return namespace + "/" + service, cli.Misused(err)
}

// exec runs a command of the agent's program in the agent's pod. The error has its exit status.
func (k *cluster) exec(ctx context.Context, a agent, o remotecommand.StreamOptions, args ...string) error {
	at := k.client.RESTClient().Post().Resource("pods").Namespace(k.place).Name(a.pod).SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{
			Container: a.container, Command: append([]string{programs.Agent}, args...), Stdout: true, Stderr: o.Stderr != nil,
		}, scheme.ParameterCodec).URL()
	socket, err := remotecommand.NewWebSocketExecutor(k.config, "GET", at.String())
	if err != nil {
		return err
	}
	old, err := remotecommand.NewSPDYExecutor(k.config, "POST", at)
	if err != nil {
		return err
	}
	either, err := remotecommand.NewFallbackExecutor(socket, old, func(err error) bool {
		return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
	})
	if err != nil {
		return err
	}
	return either.StreamWithContext(ctx, o)
}

// get decodes what a command prints in JSON, whatever its exit status is.
func (k *cluster) get(ctx context.Context, a agent, to any, args ...string) error {
	var out, problem bytes.Buffer
	err := k.exec(ctx, a, remotecommand.StreamOptions{Stdout: &out, Stderr: &problem}, append(args, "-o", "json")...)
	if out.Len() > 0 {
		return json.Unmarshal(out.Bytes(), to)
	}
	if text := strings.TrimSpace(problem.String()); text != "" {
		err = errors.New(strings.TrimPrefix(text, programs.Agent+": "))
	}
	return cmp.Or(err, io.ErrUnexpectedEOF)
}

// atATime bounds the agents that are asked at the same time.
const atATime = 16

// each asks all agents.
func each[T any](agents []agent, ask func(agent) T) []T {
	all := make([]T, len(agents))
	var group errgroup.Group
	group.SetLimit(atATime)
	for i, a := range agents {
		group.Go(func() error {
			all[i] = ask(a)
			return nil
		})
	}
	_ = group.Wait()
	return all
}
