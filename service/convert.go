package service

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unique"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"fairlead.dev/fairlead/model"
)

// maxProblems bounds what is said about one object: a slice can have thousands of bad endpoints.
const maxProblems = 20

// maxName is how long the name of an object can be, with its namespace.
const maxName = validation.DNS1123LabelMaxLength + 1 + validation.DNS1123SubdomainMaxLength

// report gathers the problems of one object.
type report struct {
	kind     string
	of       Name
	problems []Problem
	more     int // problems beyond maxProblems
}

func (r *report) add(field, format string, args ...any) {
	if len(r.problems) == maxProblems {
		r.more++
		return
	}
	r.problems = append(r.problems, Problem{Object: r.object(), Field: field, Reason: fmt.Sprintf(format, args...)})
}

func (r *report) done() []Problem {
	if r.more > 0 {
		r.problems = append(r.problems, Problem{Object: r.object(), Reason: fmt.Sprintf("%d more problems", r.more)})
	}
	return r.problems
}

func (r *report) object() string {
	name := r.of.String()
	if r.of.Namespace == "" { // there is one for the whole cluster
		name = r.of.Name
	}
	if strings.ContainsFunc(name, func(c rune) bool { return !unicode.IsGraphic(c) }) || len(name) > maxName {
		name = fmt.Sprintf("%.80q", name)
	}
	return r.kind + " " + name
}

// name is the object's name. Like kubectl it takes a missing namespace for "default". Decoders give each string memory
// of its own, so that a name, of which there are hardly two alike, may be kept as it is.
func (r *report) name(m *metav1.ObjectMeta) Name {
	r.of = Name{Namespace: intern(m.Namespace), Name: m.Name}
	if m.Namespace == "" {
		r.of.Namespace = metav1.NamespaceDefault
	}
	return r.of
}

// intern gives equal strings that live at the same time one copy. It is for those of which few differ.
func intern(s string) string { return unique.Make(s).Value() }

// label reports whether s can be a part of a Service's name, and thereby a word in a row. It is
// validation.IsDNS1123Label, whose regular expression takes half of the time in which a Service is read.
func label(s string) bool {
	const inside = "-0123456789abcdefghijklmnopqrstuvwxyz"
	return s != "" && len(s) <= validation.DNS1123LabelMaxLength && s[0] != '-' && s[len(s)-1] != '-' &&
		strings.Trim(s, inside) == ""
}

// subdomain reports whether s consists of what the names of objects and nodes have, or is empty: nothing in it can
// break a line, or out of quotes.
func subdomain(s string) bool {
	const allowed = "-.0123456789abcdefghijklmnopqrstuvwxyz"
	return len(s) <= validation.DNS1123SubdomainMaxLength && strings.Trim(s, allowed) == ""
}

// addr parses an address that can be a destination. The API server accepts leading zeros in old objects; they are
// refused here, as some programs read them as octal.
func (r *report) addr(field, text string) (netip.Addr, bool) {
	a, err := netip.ParseAddr(strings.TrimSpace(text))
	a = a.Unmap()
	switch {
	case err != nil || a.Zone() != "":
		r.add(field, "%.40q is not an IP address; it is left out", text)
	case a.IsUnspecified() || a.IsMulticast() || a.IsLoopback() || a.IsLinkLocalUnicast():
		r.add(field, "%s is an unspecified, loopback, link-local or multicast address; it is left out", a)
	default:
		return a, true
	}
	return netip.Addr{}, false
}

// plainAddr is addr for what tenants write: there an IPv4 address in the form of IPv6 is none, as in the API server's
// validation of new objects.
func (r *report) plainAddr(field, text string) (netip.Addr, bool) {
	if a, err := netip.ParseAddr(strings.TrimSpace(text)); err == nil && a.Is4In6() {
		r.add(field, "%s is an IPv4 address in the form of IPv6; it is left out", a)
		return a, false
	}
	return r.addr(field, text)
}

// prefix parses a CIDR.
func (r *report) prefix(field, text string) (netip.Prefix, bool) {
	p, err := netip.ParsePrefix(strings.TrimSpace(text))
	if err != nil || p.Addr().Is4In6() {
		r.add(field, "%.60q is not a CIDR such as 10.0.0.0/8; it is left out", text)
		return netip.Prefix{}, false
	}
	return p.Masked(), true
}

func (r *report) prefixes(field string, texts []string) []netip.Prefix {
	prefixes := []netip.Prefix{}
	for i, text := range texts {
		if p, ok := r.prefix(index(field, i), text); ok {
			prefixes = append(prefixes, p)
		}
	}
	return prefixes
}

// port accepts 1 to 65535.
func (r *report) port(field string, port int32) (uint16, bool) {
	if port < 1 || port > 65535 {
		r.add(field, "%d is not a port (1-65535); it is left out", port)
		return 0, false
	}
	return uint16(port), true
}

// protocol accepts those a Service can have; like the API server it takes none for TCP.
func (r *report) protocol(field, name string) (model.Protocol, bool) {
	if name == "" {
		return model.TCP, true
	}
	p, err := model.ParseProtocol(name)
	if err != nil {
		r.add(field, "%v; the port is left out", err)
	}
	return p, err == nil
}

// index is the path of a list's element.
func index(field string, i int) string { return field + "[" + strconv.Itoa(i) + "]" }

// hasFamily reports whether one of the addresses is of the other one's family.
func hasFamily(addrs []netip.Addr, a netip.Addr) bool {
	return slices.ContainsFunc(addrs, func(b netip.Addr) bool { return a.Is4() == b.Is4() })
}
