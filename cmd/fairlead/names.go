package main

import (
	"context"
	"fmt"
	"net/netip"
	"net/url"
	"strings"

	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/service"
)

// addressOf replaces the name of a Service in a destination by one of its addresses. svc/NAMESPACE/NAME[:PORT] and
// NAME.NAMESPACE.svc[.DOMAIN][:PORT] stand for its ClusterIP, node:PORT for an address of this node with that NodePort.
// PORT is a name or number; a Service with one port needs none. Other texts stay as they are. The
// address is of the family of the source, if the Service has that family.
func (i *inspection) addressOf(ctx context.Context, destination, source string) (string, error) {
	where, protocol, _ := strings.Cut(strings.TrimPrefix(destination, "svc/"), "/")
	host, port, _ := strings.Cut(where, ":")
	var name service.Name
	switch parts := strings.Split(host, "."); {
	case strings.HasPrefix(destination, "svc/"):
		name.Namespace = where
		if name.Name, port, _ = strings.Cut(protocol, ":"); name.Name == "" {
			return "", cli.Misused(fmt.Errorf("%q is not svc/NAMESPACE/NAME:PORT", destination))
		}
		port, protocol, _ = strings.Cut(port, "/")
	case len(parts) > 2 && parts[2] == "svc":
		name = service.Name{Namespace: parts[1], Name: parts[0]}
	case host == "node":
	default:
		return destination, nil
	}
	all, err := i.summaries(ctx, name)
	if err != nil {
		return "", err
	}
	address, _ := netip.ParseAddr(source)
	var found, names []string
	ports := 0
	for _, s := range all {
		for _, p := range s.Ports {
			names = append(names, portText(p))
			if some := addressesOf(p, name.Name == "", port, protocol); len(some) > 0 {
				found, ports = append(found, some...), ports+1
			}
		}
	}
	if name.Name != "" && ports > 1 {
		found = nil
	}
	for _, at := range found {
		if a, _ := netip.ParseAddrPort(at[:strings.IndexByte(at, '/')]); a.Addr().Is6() == address.Is6() {
			return at, nil
		}
	}
	switch {
	case len(found) > 0:
		return found[0], nil
	case name.Name == "":
		return "", cli.Misused(fmt.Errorf("no Service here has NodePort %q", port))
	case len(all) == 0:
		return "", cli.Misused(fmt.Errorf("%q: there is no Service %s here", destination, name))
	}
	return "", cli.Misused(fmt.Errorf("%q: name one port of Service %s: %s", destination, name, strings.Join(names, ", ")))
}

// addressesOf are the addresses of a port, with its protocol, if it is the one that is meant.
func addressesOf(p service.PortSummary, nodePort bool, port, protocol string) (found []string) {
	number, its, _ := strings.Cut(p.Port, "/")
	kind, matches := "ClusterIP", port == "" || port == p.Name || port == number
	if nodePort {
		kind, matches = "NodePort", p.NodePort != 0 && port == fmt.Sprint(p.NodePort)
	}
	if !matches || protocol != "" && !strings.EqualFold(protocol, its) {
		return nil
	}
	for _, a := range p.Addresses {
		if a.Kind == kind {
			found = append(found, a.At+"/"+its)
		}
	}
	return found
}

// summaries are those of the Service of a name, or of all if the name is empty.
func (i *inspection) summaries(ctx context.Context, name service.Name) (all []service.Summary, err error) {
	if !i.IsOffline() {
		answer, err := i.ask(ctx, url.Values{"namespace": {name.Namespace}, "name": {name.Name}})
		for _, s := range answer.Services {
			all = append(all, s.Summary)
		}
		return all, err
	}
	table, err := i.Offline(ctx)
	if err != nil {
		return nil, err
	}
	names := []service.Name{name}
	if name.Name == "" {
		names = table.ServiceNames("")
	}
	for _, name := range names {
		if s, ok := table.Summarise(name); ok {
			all = append(all, s)
		}
	}
	return all, nil
}
