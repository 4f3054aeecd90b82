package fakehns

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"strings"

	"fairlead.dev/fairlead/dataplane/kernelspace/hns"
	"fairlead.dev/fairlead/lab/hnssim"
)

// errHandle is E_HANDLE: no handle is open by that number.
const errHandle hns.Error = 0x80070006

// guid is how Windows keeps the id of an object.
type guid [16]byte

func (g guid) String() string {
	le := binary.LittleEndian
	return fmt.Sprintf("%08X-%04X-%04X-%X-%X", le.Uint32(g[:]), le.Uint16(g[4:]), le.Uint16(g[6:]), g[8:10], g[10:])
}

// kinds are by the names in the entry points.
func kinds() map[string]hnssim.Kind {
	return map[string]hnssim.Kind{
		"Network": hnssim.Networks, "Endpoint": hnssim.Endpoints, "LoadBalancer": hnssim.LoadBalancers,
	}
}

// do makes a call of a program.
func (s *Server) do(c call) (a answer) {
	if c.operation == "HNSCall" {
		return s.older(c.text)
	}
	for name, kind := range kinds() {
		if verb, ok := strings.CutSuffix(c.operation, name); ok {
			return s.verb(verb, kind, c)
		}
	}
	return answer{err: hns.ErrMissing}
}

func (s *Server) verb(verb string, kind hnssim.Kind, c call) answer {
	switch verb {
	case "Enumerate":
		return s.ask(hnssim.Call{Verb: hnssim.Enumerate, Kind: kind, Document: []byte(c.text)})
	case "Open":
		if a := s.ask(hnssim.Call{Verb: hnssim.Query, Kind: kind, ID: c.id.String()}); a.err != nil {
			return a
		}
		return answer{handle: s.open(object{kind, c.id.String()})}
	case "Create":
		return s.create(kind, c)
	case "Delete":
		return s.ask(hnssim.Call{Verb: hnssim.Delete, Kind: kind, ID: c.id.String()})
	}
	s.mu.Lock()
	of, ok := s.handles[c.handle]
	if verb == "Close" {
		delete(s.handles, c.handle)
	}
	s.mu.Unlock()
	switch {
	case !ok || of.kind != kind:
		return answer{err: errHandle}
	case verb == "Query":
		return s.ask(hnssim.Call{Verb: hnssim.Query, Kind: kind, ID: of.id})
	case verb == "Modify":
		a := s.ask(hnssim.Call{Verb: hnssim.Modify, Kind: kind, ID: of.id, Document: []byte(c.text)})
		return answer{err: a.err}
	}
	return answer{}
}

func (s *Server) create(kind hnssim.Kind, c call) answer {
	s.mu.Lock()
	network := s.handles[c.handle].id
	s.mu.Unlock()
	a := s.ask(hnssim.Call{Verb: hnssim.Create, Kind: kind, ID: network, Document: []byte(c.text)})
	if a.err != nil {
		return a
	}
	var made struct{ ID string }
	if err := json.Unmarshal([]byte(a.text), &made); err != nil {
		return answer{err: err}
	}
	return answer{handle: s.open(object{kind, made.ID})}
}

func (s *Server) ask(c hnssim.Call) answer {
	text, err := s.service.Do(c)
	return answer{err: err, text: string(text)}
}

func (s *Server) open(o object) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.next++
	s.handles[s.next] = o
	return s.next
}

// older answers HNSCall, the interface of HNS's first version, whose errors are in the document.
func (s *Server) older(path string) answer {
	document := map[string]any{"Success": true, "Output": []string{}}
	if path == "/globals/version" {
		document["Output"] = s.service.Version()
	}
	text, _ := json.Marshal(document)
	return answer{text: string(text)}
}
