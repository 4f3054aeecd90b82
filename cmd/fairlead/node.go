package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"strings"

	"github.com/spf13/pflag"

	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/addrs"
	"fairlead.dev/fairlead/source/file"
)

// node is what the flags say of this machine and of where its Services come from. The names of the
// flags are kube-proxy's where it has them.
type node struct {
	manifests   []string
	hostname    string
	ips         []string
	clusterCIDR string
	localMode   string
	podBridge   string
	podPrefix   string
	nodePorts   []string
	masquerade  bool
}

func (n *node) flags(f *pflag.FlagSet) {
	f.StringArrayVar(&n.manifests, "manifests", nil, "file or directory of manifests to serve (repeatable)")
	f.StringVar(&n.hostname, "hostname-override", "", "name of this node (default: the hostname)")
	f.StringSliceVar(&n.ips, "node-ip", nil,
		"primary address of this node, one of each family (default: the Node object's, or the first of the interfaces)")
	f.StringVar(&n.clusterCIDR, "cluster-cidr", "", "range of the pods' addresses, one of each family")
	f.StringVar(&n.localMode, "detect-local-mode", "ClusterCIDR",
		"how pods are recognised: ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix")
	f.StringVar(&n.podBridge, "pod-bridge-interface", "", "the bridge of the pods, for BridgeInterface")
	f.StringVar(&n.podPrefix, "pod-interface-name-prefix", "", "how the interfaces of pods begin, for InterfaceNamePrefix")
	f.StringSliceVar(&n.nodePorts, "nodeport-addresses", nil,
		"where NodePorts are open: CIDRs, primary, localhost, all (default: as with kube-proxy's mode of the same name)")
	f.BoolVar(&n.masquerade, "masquerade-all", false, "replace the source address of all connections to ClusterIPs")
}

// options are the flags in the words of package service.
func (n *node) options() (service.Options, error) {
	o := service.Options{
		NodeName: n.hostname, NodePortAddresses: n.nodePorts, MasqueradeAll: n.masquerade, ExternalIPs: true,
	}
	if o.NodeName == "" {
		name, err := os.Hostname()
		if err != nil {
			return o, fmt.Errorf("--hostname-override is not set, and the machine has no name: %w", err)
		}
		o.NodeName = strings.ToLower(strings.TrimSpace(name))
	}
	for _, text := range n.ips {
		ip, err := netip.ParseAddr(text)
		if err != nil {
			return o, fmt.Errorf("--node-ip: %q is not an IP address", text)
		}
		o.NodeIPs = append(o.NodeIPs, ip)
	}
	local, err := n.detectLocal()
	o.DetectLocal = local
	return o, err
}

func (n *node) detectLocal() (d service.DetectLocal, err error) {
	switch d.Mode = service.LocalMode(n.localMode); d.Mode {
	case service.LocalClusterCIDR:
		for text := range strings.SplitSeq(n.clusterCIDR, ",") {
			if text = strings.TrimSpace(text); text == "" {
				continue
			}
			prefix, err := netip.ParsePrefix(text)
			if err != nil {
				return d, fmt.Errorf("--cluster-cidr: %q is not a range like 10.244.0.0/16", text)
			}
			d.ClusterCIDRs = append(d.ClusterCIDRs, prefix.Masked())
		}
		if len(d.ClusterCIDRs) == 0 {
			d.Mode = service.LocalNone
		}
	case service.LocalBridgeInterface:
		d.Interface, err = needed("--pod-bridge-interface", n.podBridge, n.localMode)
	case service.LocalInterfacePrefix:
		d.Interface, err = needed("--pod-interface-name-prefix", n.podPrefix, n.localMode)
	case service.LocalNodeCIDR:
	default:
		err = fmt.Errorf("--detect-local-mode: %q is none of %s, %s, %s, %s", n.localMode, service.LocalClusterCIDR,
			service.LocalNodeCIDR, service.LocalBridgeInterface, service.LocalInterfacePrefix)
	}
	return d, err
}

func needed(flag, value, mode string) (string, error) {
	if value == "" {
		return "", fmt.Errorf("%s is needed with --detect-local-mode=%s", flag, mode)
	}
	return value, nil
}

var errNoManifests = errors.New("--manifests is needed: a file or directory with Services and EndpointSlices")

// source reads the manifests and the addresses of the machine.
func (n *node) source(name string, log *slog.Logger) (source.Source, error) {
	if len(n.manifests) == 0 {
		return nil, errNoManifests
	}
	files, err := file.New(file.Options{Paths: n.manifests, Node: name, Log: log})
	if err != nil {
		return nil, err
	}
	interfaces, err := addrs.New()
	if err != nil {
		return nil, errors.Join(err, files.Close())
	}
	return source.Merge(files, interfaces), nil
}

// table compiles the manifests once, without a daemon. Problems go to out, one a line.
func (n *node) table(ctx context.Context, out io.Writer) (*service.Table, error) {
	o, err := n.options()
	if err != nil {
		return nil, misused(err)
	}
	table, err := service.NewTable(o)
	if err != nil {
		return nil, misused(err)
	}
	s, err := n.source(o.NodeName, slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, misused(err)
	}
	defer s.Close()
	batch, err := s.Next(ctx)
	if err != nil {
		return nil, failed(err)
	}
	_, _, problems := table.Update(batch)
	for _, p := range problems {
		fmt.Fprintln(out, "problem:", p.Error())
	}
	return table, nil
}
