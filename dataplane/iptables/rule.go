package iptables

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"fairlead.dev/fairlead/model"
)

// rule is one rule of a chain. A field that is zero is no condition. Rules are comparable, as isolate groups them by
// their shape.
type rule struct {
	src, dst netip.Prefix
	notSrc   bool   // any source but src
	in       string // the interface on which the packet arrived; a trailing * stands for any ending
	notIn    bool   // any interface but in
	protocol model.Protocol
	ports    ports
	state    states // of the connection: one of them
	notState states // none of them
	first    bool   // the connection was not yet let through: IPS_CONFIRMED is not set
	unmarked uint32 // bits of the mark that are not all set
	marked   uint32 // bits of the mark that are set
	set      string // an ipset that contains the source address
	chance   uint32 // matches at random, so many times of 1<<31
	do       target
	comment  string
}

// ports are those of the destination, from first to last.
type ports struct{ first, last uint16 }

// states are those that xt_conntrack tells.
type states uint16

// As in include/uapi/linux/netfilter/xt_conntrack.h.
const (
	stateInvalid     states = 1 << 0
	stateEstablished states = 1 << 1
	stateRelated     states = 1 << 2
	stateNew         states = 1 << 3
	stateDNAT        states = 1 << 7
)

// verb is what a rule does with a packet.
type verb uint8

const (
	nothing verb = iota
	jump
	goTo
	accept
	drop
	back // to the calling chain
	reject
	dnat
	masquerade
	orMark
	xorMark
	remember // the source address, in an ipset
)

// target is what a rule does, and with what.
type target struct {
	verb   verb
	name   string         // jump, goTo: the chain; remember: the set
	to     netip.AddrPort // dnat
	mark   uint32         // orMark, xorMark
	with   refusal        // reject
	expire time.Duration  // remember
}

// refusal is how a packet is rejected.
type refusal uint8

const (
	withReset refusal = iota
	withUnreachablePort
	withUnreachableProtocol // IPv4 only
)

func jumpTo(chain string) target { return target{verb: jump, name: chain} }
func goes(chain string) target   { return target{verb: goTo, name: chain} }

// host is the prefix that holds one address.
func host(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// row names the frontend that a rule is about, if it is about one.
func (r *rule) row() string {
	if !r.dst.IsValid() || !r.dst.IsSingleIP() || r.ports.first == 0 || r.ports.first != r.ports.last {
		return ""
	}
	return fmt.Sprintf(", frontend %s/%s", netip.AddrPortFrom(r.dst.Addr(), r.ports.first), r.protocol)
}

// String is the rule as iptables -S prints it, without its chain. It does without fmt: each rule that is written has a
// hash of it.
func (r rule) String() string {
	b := make([]byte, 0, 256)
	add := func(words ...string) {
		for _, w := range words {
			b = append(b, w...)
		}
		b = append(b, ' ')
	}
	hex := func(n uint32) string { return "0x" + strconv.FormatUint(uint64(n), 16) }
	if r.src.IsValid() {
		add(not(r.notSrc), "-s ", r.src.String())
	}
	if r.dst.IsValid() {
		add("-d ", r.dst.String())
	}
	if r.in != "" {
		add(not(r.notIn), "-i ", strings.Replace(r.in, "*", "+", 1))
	}
	if r.protocol != 0 {
		add("-p ", r.protocol.String())
	}
	if r.ports != (ports{}) {
		add("-m ", r.protocol.String(), " --dport ", r.ports.String())
	}
	if r.set != "" {
		add("-m set --match-set ", r.set, " src")
	}
	if r.marked != 0 {
		add("-m mark --mark ", hex(r.marked), "/", hex(r.marked))
	}
	if r.unmarked != 0 {
		add("-m mark ! --mark ", hex(r.unmarked), "/", hex(r.unmarked))
	}
	if r.state != 0 {
		add("-m conntrack --ctstate ", r.state.String())
	}
	if r.notState != 0 {
		add("-m conntrack ! --ctstate ", r.notState.String())
	}
	if r.first {
		add("-m conntrack ! --ctstatus CONFIRMED")
	}
	if r.comment != "" {
		add("-m comment --comment ", strconv.Quote(r.comment))
	}
	if r.chance != 0 {
		add("-m statistic --mode random --probability ", strconv.FormatFloat(float64(r.chance)/certain, 'f', 11, 64))
	}
	return string(append(b, r.do.String()...))
}

func not(b bool) string {
	if b {
		return "! "
	}
	return ""
}

func (p ports) String() string {
	if p.first == p.last {
		return strconv.Itoa(int(p.first))
	}
	return fmt.Sprintf("%d:%d", p.first, p.last)
}

func (s states) String() string {
	var words []string
	for bit, name := range slices.Backward([]string{"INVALID", "ESTABLISHED", "RELATED", "NEW", 7: "DNAT"}) {
		if s&(1<<bit) != 0 {
			words = append(words, name)
		}
	}
	return strings.Join(words, ",")
}

func (t target) String() string {
	switch t.verb {
	case jump:
		return "-j " + t.name
	case goTo:
		return "-g " + t.name
	case reject:
		return "-j REJECT --reject-with " + t.with.String()
	case dnat:
		return "-j DNAT --to-destination " + t.to.String()
	case orMark:
		return fmt.Sprintf("-j MARK --or-mark 0x%x", t.mark)
	case xorMark:
		return fmt.Sprintf("-j MARK --xor-mark 0x%x", t.mark)
	case remember:
		return fmt.Sprintf("-j SET --add-set %s src --exist --timeout %d", t.name, t.seconds())
	}
	return [...]string{
		accept: "-j ACCEPT", drop: "-j DROP", back: "-j RETURN", masquerade: "-j MASQUERADE --random-fully", remember: "",
	}[t.verb]
}

func (r refusal) String() string {
	return [...]string{"tcp-reset", "port-unreachable", "protocol-unreachable"}[r]
}

// maxTimeout is the kernel's IPSET_MAX_TIMEOUT.
const maxTimeout = 2147483

// seconds is how long an ipset remembers, which counts in whole ones.
func (t target) seconds() uint32 {
	return uint32(min(max((t.expire+time.Second-1)/time.Second, 1), maxTimeout))
}
