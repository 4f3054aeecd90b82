// Package config is all that a user can say to the daemon. kube-proxy's flags and configuration file
// mean here what they mean there; what only Fairlead knows is in a file of its own kind, so that the
// first stays valid for kube-proxy.
//
//	flags ──────────────────┐
//	KubeProxyConfiguration ─┼─► Load: decode, defaults, precedence, schema, validation ─► Config
//	FairleadConfiguration ──┘                                                              │
//	                     cmd/fairlead, package daemon ◄────────────────────────────────────┘
//
// The package knows words and their rules, and nothing of kernels or API servers.
package config

import (
	kubeproxy "k8s.io/kube-proxy/config/v1alpha1"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Config is what the daemon is to do: complete, with all defaults, and valid.
type Config struct {
	KubeProxy kubeproxy.KubeProxyConfiguration
	Fairlead  FairleadConfiguration
	// Warnings are about what was said and has no meaning here, one line each.
	Warnings []string
	// Files are those that were read, and would be read again.
	Files []string
}

// FairleadConfiguration is what kube-proxy has no words for.
type FairleadConfiguration struct {
	metav1.TypeMeta `json:",inline"`

	// Manifests are files and directories whose Services are served without a cluster; none: those of
	// the API server.
	Manifests []string `json:"manifests,omitempty"`
	// NodeIPs are the primary addresses of this node, at most one of each family; none: those that
	// the Node object or else the interfaces have.
	NodeIPs []string `json:"nodeIPs,omitempty"`
	// ControlSocket is the path of the Unix socket on which dump, explain and others ask; empty: none.
	ControlSocket string `json:"controlSocket,omitempty"`
	// AuditInterval is the time between two comparisons of the kernel with what it should hold.
	AuditInterval metav1.Duration `json:"auditInterval,omitempty"`
	// TakeOver says what becomes of rules that kube-proxy has left on the node: "Remove", once
	// Fairlead's own are in force, or "Keep".
	TakeOver string `json:"takeOver,omitempty"`
}
