package conformance

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// probe is one line of a probes section:
//
//	FROM PROTOCOL TO -> ANSWER              connections, as many as it takes to see all backends.
//	open NAME FROM PROTOCOL TO -> ANSWER    opens a connection or flow that stays.
//	flow NAME -> ANSWER                     sends something more over it.
//
// TO is an address and port, or several separated by commas. ANSWER is refused, timeout or unreachable, or the backends
// that answer, separated by |, each of them and no other. After a backend, @PLACE is the place whose address it sees as
// the client's; "source PLACE" says it for all, and "any" allows every address. An ANSWER after "pass" comes without
// the proxy's doing.
//
// More words may follow. "sticky": all connections reach one backend ("sticky NAME": that one). "forgets D": but if the
// client is silent for D, it may be another one. "share NAME F": the backend gets that part of the connections.
// "bytes N": so large are the datagrams, and their answers.
type probe struct {
	line     string
	flow     string // NAME
	again    bool   // "flow": no new connection
	from     testbed.Place
	protocol model.Protocol
	to       []netip.AddrPort
	pass     bool
	result   testbed.Result
	sources  map[string]testbed.Place // of Answered: by backend
	sticky   bool
	stickTo  string
	forgets  time.Duration
	favorite string
	share    float64
	size     int
}

// anyPlace allows every source address.
const anyPlace testbed.Place = "any"

func parseProbes(text string) ([]probe, error) {
	var probes []probe
	for _, line := range lines(text) {
		p, err := parseProbe(line)
		if err != nil {
			return nil, fmt.Errorf("%q: %w", line, err)
		}
		probes = append(probes, p)
	}
	return probes, nil
}

func parseProbe(line string) (probe, error) {
	p := probe{line: strings.Join(strings.Fields(line), " ")}
	question, answer, ok := strings.Cut(p.line, " -> ")
	if !ok {
		return p, fmt.Errorf("no answer")
	}
	words := strings.Fields(question)
	if len(words) == 2 && words[0] == "flow" {
		p.flow, p.again = words[1], true
		return p, p.answer(strings.Fields(answer))
	}
	if len(words) == 5 && words[0] == "open" {
		p.flow, words = words[1], words[2:]
	}
	if len(words) != 3 {
		return p, fmt.Errorf("no question")
	}
	if err := errors.Join(p.question(words), p.answer(strings.Fields(answer))); err != nil {
		return p, err
	}
	for name, source := range p.sources {
		if source == "" && p.flow == "" {
			return p, fmt.Errorf("whom does %s see?", name)
		}
	}
	return p, nil
}

func (p *probe) question(words []string) (err error) {
	p.from = testbed.Place(words[0])
	if p.protocol, err = model.ParseProtocol(words[1]); err != nil {
		return err
	}
	for word := range strings.SplitSeq(words[2], ",") {
		to, err := netip.ParseAddrPort(word)
		if err != nil {
			return err
		}
		p.to = append(p.to, to)
	}
	return nil
}

func (p *probe) answer(words []string) (err error) {
	next := func() (word string) {
		if len(words) > 0 {
			word, words = words[0], words[1:]
		}
		return word
	}
	word := next()
	if word == "pass" {
		p.pass, word = true, next()
	}
	p.outcome(word)
	for len(words) > 0 && err == nil {
		switch word := next(); word {
		case "source":
			p.source(testbed.Place(next()))
		case "sticky":
			p.sticky = true
			if len(words) > 0 && p.answers(words[0]) {
				p.stickTo = next()
			}
		case "forgets":
			p.forgets, err = time.ParseDuration(next())
		case "share":
			p.favorite = next()
			p.share, err = strconv.ParseFloat(next(), 64)
		case "bytes":
			p.size, err = strconv.Atoi(next())
		default:
			err = fmt.Errorf("unknown word %q", word)
		}
	}
	return err
}

func (p *probe) outcome(word string) {
	switch word {
	case "refused":
		p.result = testbed.Refused
	case "timeout":
		p.result = testbed.TimedOut
	case "unreachable":
		p.result = testbed.Unreachable
	default:
		p.result, p.sources = testbed.Answered, map[string]testbed.Place{}
		for backend := range strings.SplitSeq(word, "|") {
			name, source, _ := strings.Cut(backend, "@")
			p.sources[name] = testbed.Place(source)
		}
	}
}

// source fills in the place for the backends that have none of their own.
func (p *probe) source(place testbed.Place) {
	for name, own := range p.sources {
		if own == "" {
			p.sources[name] = place
		}
	}
}

func (p *probe) answers(backend string) bool {
	_, ok := p.sources[backend]
	return ok
}

// check compares the expected answer with what the model says; the model and the kernel are then
// held against the same line.
func (p *probe) check(s *model.State, c *testCase) error {
	for _, to := range p.to {
		source, iface := c.arrival(p.from, to.Addr())
		d := s.Lookup(model.Packet{Protocol: p.protocol, Source: source, Destination: to, Interface: iface})
		if want := p.verdict(); d.Verdict != want {
			return fmt.Errorf("%s: the model says %s", p.line, d.Verdict)
		}
		if d.Verdict == model.Forward {
			if err := p.checkBackends(d, s.Pools[d.Pool].Serving()); err != nil {
				return err
			}
		}
	}
	return nil
}

// ofSocket reports whether a TCP or UDP socket on the node under test sends the probe.
func (p *probe) ofSocket() bool {
	return p.protocol != model.SCTP && onNode(p.from)
}

// ofDriver reports whether the probe comes to the node under test from elsewhere, and is dropped or goes elsewhere.
func (p *probe) ofDriver() bool {
	if p.again || onNode(p.from) {
		return false
	}
	for backend := range p.sources {
		if !onNode(testbed.Place(backend)) {
			return true
		}
	}
	return p.result == testbed.TimedOut
}

// keepsSource is the probe if nothing hides its sender's address.
func (p *probe) keepsSource() probe {
	out := *p
	out.sources = maps.Clone(p.sources)
	for name, source := range p.sources {
		if source == testbed.Node {
			out.sources[name] = p.from
		}
	}
	return out
}

func (p *probe) verdict() model.Verdict {
	switch {
	case p.pass || p.result == testbed.Unreachable:
		return model.Pass
	case p.result == testbed.Refused:
		return model.Reject
	case p.result == testbed.TimedOut:
		return model.Drop
	}
	return model.Forward
}

func (p *probe) checkBackends(d model.Decision, backends []model.Backend) error {
	if len(backends) != len(p.sources) {
		return fmt.Errorf("%s: the model says %v", p.line, backends)
	}
	for _, b := range backends {
		name := podAt(b.AddrPort())
		want, ok := p.sources[name]
		seen := p.from
		if d.Masquerade(b) {
			seen = testbed.Node
		}
		switch {
		case !ok:
			return fmt.Errorf("%s: the model has %s (%s) too", p.line, b, name)
		case want != seen && want != anyPlace && p.flow == "":
			return fmt.Errorf("%s: the model says that %s sees %s", p.line, name, seen)
		}
	}
	return nil
}

// barrier reports whether the probe must not run at the same time as others.
func (p *probe) barrier() bool { return p.flow != "" || p.forgets != 0 }

// batches cuts a step's probes into groups whose members may run at the same time.
func batches(probes []probe) (out [][]probe) {
	alone := true // the last group takes no more
	for _, p := range probes {
		if alone || p.barrier() {
			out = append(out, nil)
		}
		last := &out[len(out)-1]
		*last = append(*last, p)
		alone = p.barrier()
	}
	return out
}

// queues divides a batch into probes that run one after the other, side by side with other queues. Those that are
// answered make one queue. Where a scheduler takes two backends in turn, as IPVS's rr does, two clients that connect in
// step would each see one of them only. Silence and refusals reach no scheduler, and silence takes long.
func queues(batch []probe) (out [][]probe) {
	var answered []probe
	for _, p := range batch {
		if p.result == testbed.Answered {
			answered = append(answered, p)
		} else {
			out = append(out, []probe{p})
		}
	}
	return append(out, answered)
}
