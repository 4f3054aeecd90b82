package plugin

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/service"
)

// addressOf replaces the name of a Service in a destination by one of its addresses. svc/NAMESPACE/NAME[:PORT] and
// NAME.NAMESPACE.svc[.DOMAIN][:PORT] stand for its ClusterIP, node:PORT for an address of this node with that NodePort.
// PORT is a name or number; a Service with one port needs none. Other texts stay as they are. The
// address is of the family of the source, if the Service has that family.
func (i *inspection) addressOf(ctx context.Context, destination, source string) (string, error) {
	w, named := readDestination(destination)
	if !named {
		return destination, nil
	}
	all, err := i.summaries(ctx, w.name)
	if err != nil {
		return "", err
	}
	var found []place
	var ports []string
	for _, s := range all {
		if w.name.Name != "" && s.Ignored != "" {
			return "", cli.Misused(fmt.Errorf("%q: Service %s is not served: %s", destination, w.name, s.Ignored))
		}
		for _, p := range s.Ports {
			ports = append(ports, portText(p))
			found = append(found, w.places(p)...)
		}
	}
	if chosen := choosePlace(found, w.protocol, source); chosen != "" {
		return chosen, nil
	}
	switch {
	case w.name.Name == "":
		return "", cli.Misused(fmt.Errorf("no Service here has NodePort %q", w.port))
	case len(all) == 0:
		return "", cli.Misused(fmt.Errorf("%q: there is no Service %s here", destination, w.name))
	}
	names := strings.Join(ports, ", ")
	return "", cli.Misused(fmt.Errorf("%q: name one port of Service %s: %s", destination, w.name, names))
}

// wanted is a destination by name.
type wanted struct {
	name           service.Name // empty: any Service, by its NodePort
	port, protocol string
}

// readDestination reports whether a text names a Service, or a NodePort of this node.
func readDestination(text string) (w wanted, named bool) {
	rest, typed := strings.CutPrefix(text, "svc/")
	if typed {
		w.name.Namespace, rest, _ = strings.Cut(rest, "/")
	}
	rest, w.protocol, _ = strings.Cut(rest, "/")
	host, port, _ := strings.Cut(rest, ":")
	w.port = port
	parts := strings.Split(host, ".")
	switch {
	case typed:
		w.name.Name = host
	case len(parts) > 2 && parts[2] == "svc":
		w.name = service.Name{Namespace: parts[1], Name: parts[0]}
	default:
		return w, host == "node"
	}
	return w, w.name.Name != ""
}

// place is an address of a port of a Service.
type place struct {
	at       netip.AddrPort
	port     string // of the Service, which tells its ports apart
	protocol string
}

// places are the addresses of a port, if it is one that is meant.
func (w wanted) places(p service.PortSummary) (found []place) {
	number, protocol, _ := strings.Cut(p.Port, "/")
	kind, matches := "ClusterIP", w.port == "" || w.port == p.Name || w.port == number
	if w.name.Name == "" {
		kind, matches = "NodePort", p.NodePort != 0 && w.port == fmt.Sprint(p.NodePort)
	}
	if !matches || w.protocol != "" && !strings.EqualFold(w.protocol, protocol) {
		return nil
	}
	for _, a := range p.Addresses {
		if at, err := netip.ParseAddrPort(a.At); a.Kind == kind && err == nil {
			found = append(found, place{at, portText(p), protocol})
		}
	}
	return found
}

// choosePlace prefers TCP, if no protocol is named, the family of the source, and addresses that are not loopback. It
// is empty if there are several ports, or none.
func choosePlace(found []place, protocol, source string) string {
	isTCP := func(p place) bool { return p.protocol == "tcp" }
	if protocol == "" && slices.ContainsFunc(found, isTCP) {
		found = slices.DeleteFunc(found, func(p place) bool { return !isTCP(p) })
	}
	from, _ := netip.ParseAddr(source)
	rank := func(p place) int {
		n := 0
		if p.at.Addr().IsLoopback() && !from.IsLoopback() {
			n += 2
		}
		if from.IsValid() && p.at.Addr().Is4() != from.Is4() || !from.IsValid() && p.at.Addr().Is6() {
			n++
		}
		return n
	}
	if len(found) == 0 || slices.ContainsFunc(found, func(p place) bool { return p.port != found[0].port }) {
		return ""
	}
	best := slices.MinFunc(found, func(a, b place) int { return cmp.Compare(rank(a), rank(b)) })
	return best.at.String() + "/" + best.protocol
}

// summaries are those of the Service of a name, or of all if the name is empty.
func (i *inspection) summaries(ctx context.Context, name service.Name) (all []service.Summary, err error) {
	if !i.IsOffline() {
		found, err := i.services(ctx, url.Values{"namespace": {name.Namespace}, "name": {name.Name}})
		for _, s := range found.Services {
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
		if s, ok := table.Summarise(name, false); ok {
			all = append(all, s)
		}
	}
	return all, nil
}
