package config

import (
	"slices"

	kubeproxy "k8s.io/kube-proxy/config/v1alpha1"
)

// The modes. kube-proxy has the first three on Linux, and kernelspace on Windows. Fairlead's data planes have the
// others as well.
const (
	ModeIPTables  kubeproxy.ProxyMode = "iptables"
	ModeIPVS      kubeproxy.ProxyMode = "ipvs"
	ModeNFTables  kubeproxy.ProxyMode = "nftables"
	ModeEBPF      kubeproxy.ProxyMode = "ebpf"
	ModeUserspace kubeproxy.ProxyMode = "userspace"
	// ModeKernelspace is the only mode on Windows.
	ModeKernelspace kubeproxy.ProxyMode = "kernelspace"
	// ModeAuto has the daemon choose a data plane.
	ModeAuto kubeproxy.ProxyMode = "auto"
)

// How packets of pods are told from others.
const (
	LocalClusterCIDR         kubeproxy.LocalMode = "ClusterCIDR"
	LocalNodeCIDR            kubeproxy.LocalMode = "NodeCIDR"
	LocalBridgeInterface     kubeproxy.LocalMode = "BridgeInterface"
	LocalInterfaceNamePrefix kubeproxy.LocalMode = "InterfaceNamePrefix"
)

func modes() []kubeproxy.ProxyMode {
	return []kubeproxy.ProxyMode{ModeIPTables, ModeIPVS, ModeNFTables, ModeEBPF, ModeUserspace, ModeKernelspace, ModeAuto}
}

// windows reports whether the planes are those of Windows.
func windows(planes []string) bool { return slices.Contains(planes, string(ModeKernelspace)) }

// planeFor is the plane that serves a mode, the word auto for one that is to be chosen, or "". The modes of kube-proxy
// are served whatever is built, by the first plane if need be, as a node must not lose its Services over that.
func planeFor(mode kubeproxy.ProxyMode, planes []string) string {
	if slices.Contains(planes, string(mode)) || mode == ModeAuto && len(planes) > 0 {
		return string(mode)
	}
	if len(planes) > 0 && (mode == ModeIPTables || mode == ModeIPVS) {
		return planes[0]
	}
	return ""
}
