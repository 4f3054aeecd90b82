package localhost

import (
	"fairlead.dev/fairlead/dataplane/internal/subset"
	"fairlead.dev/fairlead/model"
)

// ours tells the frontends that are served here.
type ours func(model.Key) bool

func onLoopback(key model.Key) bool     { return key.Addr.IsLoopback() }
func onIPv6Loopback(key model.Key) bool { return key.Addr.Is6() && onLoopback(key) }

// row implements subset.Row for the wrapped plane, which has all rows but those that are served here.
func (ours ours) row(_ *model.State, key model.Key, f model.Frontend) (model.Frontend, bool) {
	switch {
	case !ours(key) || f.Verdict != model.Forward || !f.Allows(key.Addr):
		return f, true
	case key.Protocol == model.SCTP:
		return model.Frontend{Service: f.Service, Verdict: model.Reject}, true
	}
	return f, false
}

// look finds what a State has that is ours, and makes the part of the wrapped plane if there is anything. That plane
// has the whole State otherwise, and the part is nil.
func look(s *model.State, ours ours) (part *subset.Subset, found keys) {
	found = keys{}
	for key := range s.Frontends {
		found.add(ours, key)
	}
	if len(found) > 0 {
		part = subset.Of(s, ours.row)
	}
	return part, found
}

// inner is the State of the wrapped plane.
func inner(s *model.State, part *subset.Subset) *model.State {
	if part == nil {
		return s
	}
	return part.State
}
