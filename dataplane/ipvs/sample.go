package ipvs

import (
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/ipvs"
)

// Nothing says when IPVS is changed, and to list thousands of virtual servers takes long. Of so many an Audit looks at
// their number, of which the kernel keeps account, and at the real servers of some, in turn. All are listed when the
// number is not what we have made of it, and else so seldom that it takes little of the time.

const (
	// maxVerified is how many virtual servers are all looked at each time.
	maxVerified = 500
	// verifyTime is how long an Audit looks at some of more.
	verifyTime = time.Millisecond
	// verifyShare is the share of the time that listing all takes: one in so many.
	verifyShare = 500
	// verifyEach is how long it may be, however long the last list took.
	verifyEach = 5 * time.Minute
)

// turns is where Audits of many virtual servers go on.
type turns struct {
	keys   []ipvs.Key // that are still to be looked at
	others int        // virtual servers beside those that the client made, when all were listed
	due    time.Time  // when they are listed again
}

// verify reports what of the held virtual servers is not so in the kernel.
func (s *servers) verify() ([]dataplane.Drift, error) {
	if err := s.client.fault("ipvs list"); err != nil {
		return nil, err
	}
	n, err := s.client.Count()
	if err != nil {
		return nil, err
	}
	few, start := len(s.held) <= maxVerified, time.Now()
	if others := n - s.client.Made(); few || others != s.turns.others || start.After(s.turns.due) {
		drifts, err := s.verifyAll(few)
		s.turns.others, s.turns.due = others, listAgain(start, time.Now())
		if len(drifts) > 0 {
			s.turns = turns{} // not until it is repaired
		}
		if few || err != nil || len(drifts) > 0 {
			return drifts, err
		}
	}
	return s.verifySome()
}

// listAgain is when all are listed again if that took from start until now.
func listAgain(start, now time.Time) time.Time {
	return now.Add(min(verifyShare*now.Sub(start), verifyEach))
}

// verifySome compares the real servers of those whose turn it is.
func (s *servers) verifySome() (drifts []dataplane.Drift, err error) {
	if len(s.turns.keys) == 0 {
		for key := range s.held {
			s.turns.keys = append(s.turns.keys, key)
		}
	}
	for start := time.Now(); len(s.turns.keys) > 0; {
		last := len(s.turns.keys) - 1
		key := s.turns.keys[last]
		s.turns.keys = s.turns.keys[:last]
		held := s.held[key]
		if held == nil {
			continue
		}
		destinations, err := s.client.Destinations(key)
		if err != nil {
			return nil, err
		}
		drifts = append(drifts, adopt(ipvs.Server{}, destinations).compareDestinations(key, held.destinations)...)
		if time.Since(start) > verifyTime {
			break
		}
	}
	return drifts, nil
}
