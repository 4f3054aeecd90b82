package conformance

import (
	"net/netip"
	"regexp"
	"strings"

	"fairlead.dev/fairlead/lab/testbed"
)

// Cases are written in IPv4. Their IPv6 form has each address replaced by its twin.

// EmbedText derives the IPv6 form of a case, or of rows.
func EmbedText(text string) string {
	text = addrPattern().ReplaceAllStringFunc(text, embedWord)
	text = poolPattern().ReplaceAllString(text, "${1}6")
	return strings.NewReplacer("addressType: IPv4", "addressType: IPv6", "[IPv4]", "[IPv6]").Replace(text)
}

// addrPattern finds 192.0.2.1, 192.0.2.0/24 and 192.0.2.1:80.
func addrPattern() *regexp.Regexp {
	return regexp.MustCompile(`\b\d+\.\d+\.\d+\.\d+(/\d+|:\d+)?\b`)
}

// poolPattern finds the names of pools.
func poolPattern() *regexp.Regexp {
	return regexp.MustCompile(`((?:pool|backend|forward) \S+/\S+ (?:cluster|local))\b`)
}

// embedWord is the IPv6 form of an address, prefix or address and port; other words stay.
func embedWord(word string) string {
	if p, err := netip.ParsePrefix(word); err == nil {
		return embedPrefix(p).String()
	}
	if a, err := netip.ParseAddrPort(word); err == nil {
		return netip.AddrPortFrom(embedAddr(a.Addr()), a.Port()).String()
	}
	if a, err := netip.ParseAddr(word); err == nil {
		return embedAddr(a).String()
	}
	return word
}

func embedAddr(a netip.Addr) netip.Addr {
	if a.IsLoopback() {
		return netip.IPv6Loopback()
	}
	return testbed.EmbedV6(a)
}

func embedPrefix(p netip.Prefix) netip.Prefix {
	switch {
	case p.Bits() == 0:
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	case p.Addr().IsLoopback():
		return netip.PrefixFrom(netip.IPv6Loopback(), 128)
	}
	return netip.PrefixFrom(embedAddr(p.Addr()), p.Bits()+96)
}
