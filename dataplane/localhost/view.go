package localhost

import (
	"fairlead.dev/fairlead/dataplane/internal/subset"
	"fairlead.dev/fairlead/model"
)

// ours tells the frontends that are served here.
type ours func(model.Key) bool

func onLoopback(key model.Key) bool     { return key.Addr.IsLoopback() }
func onIPv6Loopback(key model.Key) bool { return key.Addr.Is6() && onLoopback(key) }

// parts are what the wrapped plane and the relay have of a State; nil, both, if there is no frontend of ours: the
// wrapped plane has the State itself then.
func (ours ours) parts(s *model.State) (wrapped, served *subset.Subset) {
	for key := range s.Frontends {
		if ours(key) {
			return subset.Of(s, ours.passed), subset.Of(s, ours.served)
		}
	}
	return nil, nil
}

// passed implements subset.Row for the wrapped plane.
func (ours ours) passed(_ *model.State, key model.Key, f model.Frontend) (model.Frontend, bool) {
	switch {
	case !ours(key) || f.Verdict != model.Forward || !f.Allows(key.Addr):
		return f, true
	case key.Protocol == model.SCTP:
		return model.Frontend{Service: f.Service, Verdict: model.Reject}, true
	}
	return f, false
}

// served implements subset.Row for the relay, which has what processes of the node meet there.
func (ours ours) served(s *model.State, key model.Key, f model.Frontend) (model.Frontend, bool) {
	if !ours(key) || key.Protocol == model.SCTP {
		return f, false
	}
	d := s.Lookup(model.Packet{Protocol: key.Protocol, Source: key.Addr, Destination: key.AddrPort()})
	return model.Frontend{Service: f.Service, Verdict: model.Forward, Pool: d.Pool},
		d.Verdict == model.Forward && d.Key == key
}

// inner is the State of the wrapped plane.
func inner(s *model.State, part *subset.Subset) *model.State {
	if part == nil {
		return s
	}
	return part.State
}
