package handover

import (
	"fmt"

	"fairlead.dev/fairlead/internal/defect"
)

// State says what is to be done about planes that are not in force.
type State int

const (
	// Starting: no rows were programmed by this process. Rows of an earlier process may serve, and have sessions.
	Starting State = iota
	// Clearing: what others have left is to be removed, once the plane in force holds all rows.
	Clearing
	// Draining: nothing is left of others but what open connections need. The Handover looks from time to time.
	Draining
	// Alone: nothing is left of others.
	Alone
	// Switching: another plane is being programmed beside the one in force. Nothing is removed.
	Switching
)

// event is what makes a machine go on.
type event int

const (
	synced    event = iota // the plane in force holds all rows
	cleared                // nothing is left of others
	drains                 // nothing but what connections need
	resists                // something could not be removed
	began                  // another plane is being opened
	activated              // that plane is in force
	abandoned              // it is not, and what it has left is to be removed
	replaced               // the plane in force was opened anew with other settings
)

// transitions are all that may happen. Where two states have no event in common, that cannot come.
var transitions = map[State]map[event]State{
	Starting: {synced: Clearing, began: Switching, replaced: Starting},
	Clearing: {
		synced: Clearing, cleared: Alone, drains: Draining, resists: Clearing, began: Switching, replaced: Clearing,
	},
	Draining: {
		synced: Draining, cleared: Alone, drains: Draining, resists: Clearing, began: Switching, replaced: Clearing,
	},
	Alone:     {synced: Alone, began: Switching, replaced: Clearing},
	Switching: {synced: Switching, activated: Clearing, abandoned: Clearing},
}

// on is the State after an event. An event that transitions does not have is a mistake in this package.
func (s State) on(e event) State {
	next, ok := transitions[s][e]
	switch {
	case e == synced && s == Switching && defect.Is(defect.HandoverHold):
		return Clearing
	case e == abandoned && defect.Is(defect.HandoverAbandon):
		return Alone
	case !ok && !defect.Is(defect.HandoverHold):
		panic(fmt.Sprintf("handover: event %d in state %d", e, s))
	}
	return next
}
