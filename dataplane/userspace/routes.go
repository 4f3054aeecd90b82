package userspace

import (
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
)

const (
	// routeTable has one route: everything is local. Rules lead marked packets there ("ip rule", "ip route show table
	// 17985"). The number is FA in ASCII.
	routeTable   = 0x4641
	rulePriority = 99
	protocol     = 250 // marks our rules and routes, as other planes' ("ip route show table all proto 250")
	ownProtocol  = 251 // marks the route of the own address; those of another plane in table local have the other number
	loopback     = 1   // the index of lo in every network namespace
)

// routes lead packets with our mark to this node's own sockets, whatever their destination.
type routes struct {
	handle *netlink.Handle
	mark   uint32
	unused bool // no packet is marked: only the own address is local
}

func openRoutes(mark uint32) (*routes, error) {
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink socket for routes: %w", err)
	}
	return &routes{handle: handle, mark: mark}, nil
}

func (r *routes) rule(family int) *netlink.Rule {
	rule := netlink.NewRule()
	rule.Family, rule.Priority, rule.Table, rule.Protocol = family, rulePriority, routeTable, protocol
	rule.Mark, rule.Mask = r.mark, &r.mark
	return rule
}

func route(family int) *netlink.Route {
	all := &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
	if family == unix.AF_INET6 {
		all = &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}
	}
	return &netlink.Route{
		Family: family, Dst: all, LinkIndex: loopback, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST,
		Table: routeTable, Protocol: protocol,
	}
}

// ownRoute makes the own address local.
func ownRoute(family int) *netlink.Route {
	own := ownAddress(family == unix.AF_INET6)
	return &netlink.Route{
		Family: family, Dst: &net.IPNet{IP: own.AsSlice(), Mask: net.CIDRMask(own.BitLen(), own.BitLen())},
		LinkIndex: loopback, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST,
		Table: unix.RT_TABLE_LOCAL, Protocol: ownProtocol,
	}
}

// found is what the kernel holds in one family.
type found struct {
	rules  []netlink.Rule
	routes []netlink.Route
	own    []netlink.Route // that of the own address
}

func (r *routes) load(family int) (f found, err error) {
	rules, err := r.handle.RuleListFiltered(family, &netlink.Rule{Table: routeTable}, netlink.RT_FILTER_TABLE)
	if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) { // no IPv6, or no policy routing
		return f, nil
	}
	if err != nil {
		return f, fmt.Errorf("list rules of routing: %w", err)
	}
	routes, err := r.handle.RouteListFiltered(family, &netlink.Route{Table: routeTable}, netlink.RT_FILTER_TABLE)
	if err != nil {
		return f, fmt.Errorf("list routes: %w", err)
	}
	own, err := r.handle.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_LOCAL, Protocol: ownProtocol},
		netlink.RT_FILTER_TABLE|netlink.RT_FILTER_PROTOCOL)
	if err != nil {
		return f, fmt.Errorf("list local routes: %w", err)
	}
	return found{rules, routes, own}, nil
}

// wrong are the rules that are not ours as it should be; there reports whether that is there, too.
func (r *routes) wrong(have found) (wrong []netlink.Rule, there bool) {
	for _, rule := range have.rules {
		right := rule.Mark == r.mark && rule.Mask != nil && *rule.Mask == r.mark && rule.Priority == rulePriority
		if right && !rule.Invert && !there {
			there = true
		} else {
			wrong = append(wrong, rule)
		}
	}
	return wrong, there
}

// sync makes the kernel hold the rule and the routes of a family, and no other in the table.
func (r *routes) sync(family int) error {
	have, err := r.load(family)
	if err != nil {
		return err
	}
	errs := []error{r.syncOwn(family, have)}
	if r.unused {
		return errors.Join(append(errs, r.removeMarked(family, have))...)
	}
	if len(have.routes) != 1 || have.routes[0].Type != unix.RTN_LOCAL {
		errs = append(errs, r.deleteRoutes(have.routes),
			describe("add the local route", r.handle.RouteReplace(route(family))))
	}
	return errors.Join(append(errs, r.syncRules(family, have))...)
}

// syncRules deletes the rules that are not right first: the kernel deletes one that has what it is told of, which ours
// may have as well as others.
func (r *routes) syncRules(family int, have found) error {
	wrong, there := r.wrong(have)
	var errs []error
	for _, rule := range wrong {
		errs = append(errs, r.deleteRule(family, rule))
	}
	if len(wrong) > 0 && errors.Join(errs...) == nil {
		have, err := r.load(family)
		if err != nil {
			return err
		}
		return r.syncRules(family, have)
	}
	if !there {
		errs = append(errs, describe("add the rule of routing", r.handle.RuleAdd(r.rule(family))))
	}
	return errors.Join(errs...)
}

func (r *routes) syncOwn(family int, have found) error {
	own := ownRoute(family)
	if have.hasOwn(own) {
		return nil
	}
	return errors.Join(r.deleteRoutes(have.own), describe("add the route of the own address", r.handle.RouteReplace(own)))
}

func (f found) hasOwn(own *netlink.Route) bool {
	return len(f.own) == 1 && f.own[0].Dst.String() == own.Dst.String()
}

// audit reports what sync would do.
func (r *routes) audit(family int, name string) (drifts []dataplane.Drift, err error) {
	have, err := r.load(family)
	if err != nil {
		return nil, err
	}
	if own := ownRoute(family); !have.hasOwn(own) {
		drifts = append(drifts, dataplane.Drift{
			Class: "routing", Object: name + " route table local", Want: "local " + own.Dst.String() + " dev lo",
		})
	}
	if r.unused {
		return drifts, nil
	}
	want := fmt.Sprintf("fwmark %#x/%#x lookup %d", r.mark, r.mark, routeTable)
	object := name + " rule " + fmt.Sprint(rulePriority)
	wrong, there := r.wrong(have)
	for _, rule := range wrong {
		drifts = append(drifts, dataplane.Drift{Class: "routing", Object: object, Have: rule.String()})
	}
	if !there {
		drifts = append(drifts, dataplane.Drift{Class: "routing", Object: object, Want: want})
	}
	if len(have.routes) != 1 || have.routes[0].Type != unix.RTN_LOCAL {
		drifts = append(drifts, dataplane.Drift{
			Class: "routing", Object: fmt.Sprintf("%s route table %d", name, routeTable), Want: "local default dev lo",
		})
	}
	return drifts, nil
}

// marks are those that lead to the table.
func (r *routes) marks(family int) (all uint32, err error) {
	have, err := r.load(family)
	for i := range have.rules {
		all |= have.rules[i].Mark
	}
	return all, err
}

// remove deletes all that is in the table, the rules that lead there, and the route of the own address.
func (r *routes) remove(family int) error {
	have, err := r.load(family)
	if err != nil {
		return err
	}
	return errors.Join(r.removeMarked(family, have), r.deleteRoutes(have.own))
}

func (r *routes) removeMarked(family int, have found) error {
	var errs []error
	for i := range have.rules {
		errs = append(errs, r.deleteRule(family, have.rules[i]))
	}
	return errors.Join(append(errs, r.deleteRoutes(have.routes))...)
}

func (r *routes) deleteRule(family int, rule netlink.Rule) error {
	rule.Family = family
	err := r.handle.RuleDel(&rule)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return describe("delete the rule of routing "+rule.String(), err)
}

func (r *routes) deleteRoutes(all []netlink.Route) error {
	var errs []error
	for i := range all {
		if err := r.handle.RouteDel(&all[i]); !errors.Is(err, unix.ESRCH) {
			errs = append(errs, describe("delete route "+all[i].String(), err))
		}
	}
	return errors.Join(errs...)
}

func describe(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", what, err)
}

func (r *routes) close() { r.handle.Close() }
