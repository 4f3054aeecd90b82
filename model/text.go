package model

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// The canonical text form has one line per row (a pool has one more for each of its backends), in
// sorted order. Words are separated by one space:
//
//	backend default/web:http cluster 10.244.1.2:8080 local
//	backend default/web:http cluster 10.244.2.2:8080 weight 3
//	frontend 10.96.0.10:80/tcp any forward default/web:http cluster snat offcluster allow 10.0.0.0/8
//	frontend 10.96.0.10:81/tcp any reject default/web:admin
//	frontend 10.96.0.10:82/tcp any forward default/web:http cluster snat offcluster hooked
//	guard 10.96.0.0/16 drop
//	health 192.0.2.1:32000 default/web local 2
//	pods 10.244.0.0/16
//	pods interface cali*
//	pool default/web:http cluster affinity 3h0m0s scheduler mh
//	pool default/web:grpc cluster rebalance 10s
//	pool default/web:http cluster6

var (
	protocolNames = map[Protocol]string{TCP: "tcp", UDP: "udp", SCTP: "sctp"}
	scopeNames    = [...]string{Any: "any", Internal: "internal"}
	verdictNames  = [...]string{Pass: "pass", Forward: "forward", Reject: "reject", Drop: "drop"}
	poolNames     = [...]string{"cluster", "local", "cluster6", "local6"} // the latter two: IPv6
	snatNames     = [...]string{Never: "never", OffCluster: "offcluster", Always: "always"}
)

func (p Protocol) String() string {
	if name := protocolNames[p]; name != "" {
		return name
	}
	return "protocol " + strconv.Itoa(int(p))
}

// ParseProtocol is the inverse of Protocol.String; case does not matter.
func ParseProtocol(s string) (Protocol, error) {
	for _, p := range []Protocol{TCP, UDP, SCTP} {
		if strings.EqualFold(p.String(), s) {
			return p, nil
		}
	}
	return 0, fmt.Errorf("%q is not a protocol (tcp, udp or sctp)", s)
}

func (s Scope) String() string   { return nameOf(scopeNames[:], "scope", uint8(s)) }
func (v Verdict) String() string { return nameOf(verdictNames[:], "verdict", uint8(v)) }
func (s SNAT) String() string    { return nameOf(snatNames[:], "snat", uint8(s)) }

// nameOf is a number's name, or the number: those that a kernel's tables have may be of another version.
func nameOf(names []string, kind string, i uint8) string {
	if int(i) < len(names) {
		return names[i]
	}
	return kind + " " + strconv.Itoa(int(i))
}

// String is address:port/protocol and scope.
func (k Key) String() string { return fmt.Sprintf("%s/%s %s", k.AddrPort(), k.Protocol, k.Scope) }

func (p PoolID) String() string { return p.Service + " " + poolNames[p.index()] }

// index is the place of the pool's second word in poolNames.
func (p PoolID) index() (i int) {
	if p.Local {
		i++
	}
	if p.V6 {
		i += 2
	}
	return i
}

func (b Backend) String() string {
	s := b.AddrPort().String()
	if b.Local {
		s += " local"
	}
	if b.Weight != 1 {
		s += " weight " + strconv.Itoa(int(b.Weight))
	}
	return s
}

// words are what the text form says of the pool beside its name and backends.
func (p Pool) words() (s string) {
	if p.Affinity != 0 {
		s += " affinity " + p.Affinity.String()
	}
	if p.Scheduler != "" {
		s += " scheduler " + p.Scheduler
	}
	if p.Rebalance != 0 {
		s += " rebalance " + p.Rebalance.String()
	}
	return s
}

func (f Frontend) String() string {
	s := f.Verdict.String() + " "
	if f.Verdict == Forward {
		s += f.Pool.String() + " snat " + f.SNAT.String()
		if f.Hooked {
			s += " hooked"
		}
	} else {
		s += f.Service
	}
	if f.Allow != nil {
		s += " allow " + joinPrefixes(f.Allow)
	}
	return s
}

func joinPrefixes(prefixes []netip.Prefix) string {
	if len(prefixes) == 0 {
		return "none"
	}
	words := make([]string, len(prefixes))
	for i, p := range prefixes {
		words[i] = p.String()
	}
	return strings.Join(words, ",")
}

// Lines are the rows in canonical text form, sorted.
func (s *State) Lines() []string {
	var lines []string
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	for k, f := range s.Frontends {
		add("frontend %s %s", k, f)
	}
	for id, p := range s.Pools {
		add("pool %s%s", id, p.words())
		for _, b := range p.Backends {
			add("backend %s %s", id, b)
		}
	}
	for p, v := range s.Guards {
		add("guard %s %s", p, v)
	}
	for a, h := range s.Health {
		add("health %s %s local %d", a, h.Service, h.Local)
	}
	for _, p := range s.Pods.Prefixes {
		add("pods %s", p)
	}
	for _, i := range s.Pods.Interfaces {
		add("pods interface %s", i)
	}
	slices.Sort(lines)
	return lines
}

// String is the canonical text form.
func (s *State) String() string {
	lines := s.Lines()
	if len(lines) == 0 {
		return ""
	}
	return strings.Join(lines, "\n") + "\n"
}

// ParseState reads the canonical text form. Lines may come in any order; empty lines and lines that
// begin with # are skipped. Errors name the line.
func ParseState(text string) (*State, error) {
	s := NewState()
	for i, line := range strings.Split(text, "\n") {
		if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
			continue
		}
		p := &lineParser{words: strings.Fields(line)}
		p.row(s)
		if p.err == nil && len(p.words) > 0 {
			p.err = fmt.Errorf("%q is too much", p.words[0])
		}
		if p.err != nil {
			return nil, fmt.Errorf("line %d: %q: %w", i+1, line, p.err)
		}
	}
	for id, p := range s.Pools {
		slices.SortFunc(p.Backends, Backend.Compare)
		s.Pools[id] = p
	}
	s.Pods.Prefixes = Disjoint(s.Pods.Prefixes)
	slices.Sort(s.Pods.Interfaces)
	return s, s.Validate()
}

// lineParser takes the words of a line one by one and remembers the first error.
type lineParser struct {
	words []string
	err   error
}

func (p *lineParser) next() string {
	if len(p.words) == 0 {
		p.fail(fmt.Errorf("the line is too short"))
		return ""
	}
	word := p.words[0]
	p.words = p.words[1:]
	return word
}

// option consumes a word if it comes next.
func (p *lineParser) option(word string) bool {
	if len(p.words) == 0 || p.words[0] != word {
		return false
	}
	p.words = p.words[1:]
	return true
}

func (p *lineParser) fail(err error) {
	if p.err == nil {
		p.err = err
	}
}

// row adds one line to the State. A pool may have its backends before its own line, so both update what is there
// already.
func (p *lineParser) row(s *State) {
	switch kind := p.next(); kind {
	case "frontend":
		key := p.key()
		s.Frontends[key] = p.frontend()
	case "pool":
		id := p.poolID()
		pool := s.Pools[id]
		if p.option("affinity") {
			pool.Affinity = parse(p, time.ParseDuration)
		}
		if p.option("scheduler") {
			pool.Scheduler = p.next()
		}
		if p.option("rebalance") {
			pool.Rebalance = parse(p, time.ParseDuration)
		}
		s.Pools[id] = pool
	case "backend":
		id := p.poolID()
		pool := s.Pools[id]
		pool.Backends = append(pool.Backends, p.backend())
		s.Pools[id] = pool
	case "guard":
		prefix := parse(p, netip.ParsePrefix)
		s.Guards[prefix] = oneOf[Verdict](p, verdictNames[:])
	case "health":
		addr := parse(p, netip.ParseAddrPort)
		h := Health{Service: p.next()}
		p.option("local")
		h.Local = parse(p, strconv.Atoi)
		s.Health[addr] = h
	case "pods":
		if p.option("interface") {
			s.Pods.Interfaces = append(s.Pods.Interfaces, p.next())
		} else {
			s.Pods.Prefixes = append(s.Pods.Prefixes, parse(p, netip.ParsePrefix))
		}
	default:
		p.fail(fmt.Errorf("%q is not a kind of row", kind))
	}
}

func (p *lineParser) key() Key {
	addr, protocol, _ := strings.Cut(p.next(), "/")
	a := parseWord(p, addr, netip.ParseAddrPort)
	return Key{a.Addr(), a.Port(), parseWord(p, protocol, ParseProtocol), oneOf[Scope](p, scopeNames[:])}
}

// frontend reads what follows a key. Without "allow" all sources may come in: Allow is nil. "allow none" makes it
// empty, so that none may.
func (p *lineParser) frontend() Frontend {
	f := Frontend{Verdict: oneOf[Verdict](p, verdictNames[:])}
	if f.Verdict == Forward {
		f.Pool = p.poolID()
		f.Service = f.Pool.Service
		p.option("snat")
		f.SNAT = oneOf[SNAT](p, snatNames[:])
		f.Hooked = p.option("hooked")
	} else {
		f.Service = p.next()
	}
	if p.option("allow") {
		f.Allow = []netip.Prefix{}
		for word := range strings.SplitSeq(p.next(), ",") {
			if word == "none" {
				continue
			}
			f.Allow = append(f.Allow, parseWord(p, word, netip.ParsePrefix))
		}
		f.Allow = Disjoint(f.Allow)
	}
	return f
}

func (p *lineParser) poolID() PoolID {
	id := PoolID{Service: p.next()}
	kind := oneOf[uint8](p, poolNames[:])
	id.Local, id.V6 = kind&1 != 0, kind&2 != 0
	return id
}

func (p *lineParser) backend() Backend {
	b := BackendAt(parse(p, netip.ParseAddrPort))
	b.Local, b.Weight = p.option("local"), 1
	if p.option("weight") {
		b.Weight = parse(p, parseWeight)
	}
	return b
}

func parseWeight(word string) (uint16, error) {
	n, err := strconv.ParseUint(word, 10, 16)
	return uint16(n), err
}

func parse[T any](p *lineParser, f func(string) (T, error)) T { return parseWord(p, p.next(), f) }

func parseWord[T any](p *lineParser, word string, f func(string) (T, error)) T {
	v, err := f(word)
	if err != nil {
		p.fail(err)
	}
	return v
}

func oneOf[T ~uint8](p *lineParser, names []string) T {
	word := p.next()
	i := slices.Index(names, word)
	if i < 0 {
		p.fail(fmt.Errorf("%q is none of %s", word, strings.Join(names, ", ")))
		return 0
	}
	return T(i)
}
