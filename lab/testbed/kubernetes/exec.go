package kubernetes

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	utilexec "k8s.io/utils/exec"

	"fairlead.dev/fairlead/lab/testbed"
)

// kubeletAddress is the type of the address at which the API server asks kubelets. No proxy takes notice of it.
const kubeletAddress = corev1.NodeExternalDNS

// ServeExec serves pods/exec of pods on both nodes until Close: command makes what runs in the place of a command in a
// container. Its standard streams are replaced.
func (k *Kubelet) ServeExec(
	ctx context.Context, c *ControlPlane, command func(node testbed.Place, words []string) *testbed.Cmd,
) error {
	certificate, err := tls.LoadX509KeyPair(c.path("serving.crt"), c.path("serving.key"))
	if err != nil {
		return err
	}
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{certificate}})
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/exec/{namespace}/{pod}/{container}", func(w http.ResponseWriter, r *http.Request) {
		pod, err := k.pods.Pods(r.PathValue("namespace")).Get(r.PathValue("pod"))
		if err != nil {
			http.Error(w, err.Error(), http.StatusNotFound)
			return
		}
		o, err := remotecommand.NewOptions(r)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		run := executor(func(words []string) *testbed.Cmd { return command(testbed.Place(pod.Spec.NodeName), words) })
		remotecommand.ServeExec(w, r, run, pod.Name, string(pod.UID), r.PathValue("container"), r.URL.Query()["command"], o,
			time.Minute, time.Minute, remotecommand.SupportedStreamingProtocols)
	})
	s := &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
	k.group.Go(func() { _ = s.Serve(l) })
	k.execs = append(k.execs, s)
	for _, place := range []testbed.Place{testbed.Node, testbed.NodeB} {
		if err := k.announce(ctx, place, l.Addr().(*net.TCPAddr)); err != nil {
			return fmt.Errorf("announce the server of exec on %s: %w", place, err)
		}
	}
	return nil
}

// announce writes the address of the server into the status of a node.
func (k *Kubelet) announce(ctx context.Context, place testbed.Place, at *net.TCPAddr) error {
	node, err := k.client.CoreV1().Nodes().Get(ctx, string(place), metav1.GetOptions{})
	if err != nil {
		return err
	}
	address := corev1.NodeAddress{Type: kubeletAddress, Address: at.IP.String()}
	node.Status.Addresses = append(node.Status.Addresses, address)
	node.Status.DaemonEndpoints.KubeletEndpoint.Port = int32(at.Port)
	_, err = k.client.CoreV1().Nodes().UpdateStatus(ctx, node, metav1.UpdateOptions{})
	return err
}

// executor runs commands for the library of kubelets.
type executor func(words []string) *testbed.Cmd

// ExecInContainer implements remotecommand.Executor.
//
//nolint:revive // the interface has so many arguments
func (e executor) ExecInContainer(
	_ context.Context, _, _, _ string, words []string, _ io.Reader, out, problem io.WriteCloser, _ bool,
	_ <-chan remotecommand.TerminalSize, _ time.Duration,
) error {
	c := e(words)
	c.Stdout = out
	if problem != nil {
		c.Stderr = problem
	}
	err := c.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return utilexec.CodeExitError{Err: err, Code: exit.ExitCode()}
	}
	return err
}
