package daemon

import (
	"cmp"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/metrics"
	"fairlead.dev/fairlead/said"
	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/source/kube"
)

// component is the sender of Events.
const component = "fairlead"

// emitter takes Events without delay.
type emitter interface {
	Emit(kube.Event)
	Close()
}

// silence is where Events go without an API server: the log says the same.
type silence struct{}

func (silence) Emit(kube.Event) {}
func (silence) Close()          {}

// Reasons of Events. The first ones are kube-proxy's.
const (
	reasonStarting      = "Starting"
	reasonDefaultMode   = "KubeProxyDefaultMode"
	reasonHealthz       = "FailedToStartProxierHealthcheck"
	reasonMetrics       = "FailedToStartMetricServer"
	reasonServiceHealth = "FailedToStartServiceHealthcheck"

	reasonInvalid     = "Invalid" // and the kind of the object
	reasonShare       = "ShareUsedUp"
	reasonControl     = "FailedToStartControlSocket"
	reasonHost        = "FailedToConfigureHost"
	reasonSubstitute  = "DataPlaneSubstituted"
	reasonChosen      = "DataPlaneChosen"
	reasonRefused     = "ConfigurationRefused"
	reasonAccepted    = "ConfigurationAccepted"
	reasonApplied     = "ConfigurationApplied"
	reasonTakenOver   = "KubeProxyRulesRemoved"
	reasonReturned    = "KubeProxyReturned"
	reasonStays       = "KubeProxyRulesStay"
	reasonBlocked     = "ForwardingBlocked"
	reasonUnblocked   = "ForwardingOpen"
	reasonFailing     = "ProgrammingFailed"
	reasonProgramming = "ProgrammingRecovered"
	reasonDrift       = "RulesRepaired"
	reasonUndone      = "RulesUndone"
	reasonHold        = "RulesStay"

	reasonSwitched     = "DataPlaneSwitched"
	reasonSwitchFailed = "DataPlaneSwitchFailed"
)

const (
	// maxProblems is how many Events of objects of one namespace there are in a minute, if there are few of others.
	maxProblems = 100
	// driftPause is the time between two Events about a program that undoes every repair.
	driftPause = 10 * time.Minute
	// repeatTime is shorter than an API server keeps Events by default: an hour.
	repeatTime = 30 * time.Minute
)

// reporter makes Events of what happens.
type reporter struct {
	to atomic.Pointer[emitter]

	// Only the engine's goroutine uses the fields from here on.
	failing  bool
	repeated time.Time // what lasts
	drifted  time.Time
	undone   bool
	problems said.Share
}

func newReporter(to emitter) *reporter {
	r := &reporter{repeated: time.Now(), problems: said.Share{Words: 2 * maxProblems, While: time.Minute}}
	r.use(to)
	return r
}

// use sends what comes from now on somewhere else.
func (r *reporter) use(to emitter) { r.to.Store(&to) }

// emit takes an Event about the own node, unless it names another object. Its message is as short as a line of the log.
func (r *reporter) emit(e kube.Event) {
	e.Message = said.Brief(e.Message)
	(*r.to.Load()).Emit(e)
}

func (r *reporter) warn(reason, message string) {
	r.emit(kube.Event{Warning: true, Reason: reason, Message: message})
}

// Round is told of each round of the engine.
func (r *reporter) Round(round engine.Round) {
	now := time.Now()
	for _, p := range round.Problems {
		if r.problems.May(said.NamespaceOf(p.Object), now) {
			if e := problem(p); e.Reason != "" {
				r.emit(e)
			}
		}
	}
	if now.Sub(r.repeated) >= repeatTime {
		r.repeated = now
		for _, p := range round.Status.Problems {
			if e := problem(p); e.Everywhere { // of others, each node's Event is another object
				r.emit(e)
			}
		}
	}
	for _, f := range round.Refused {
		if f.Service != "" {
			if namespace, _, _ := strings.Cut(f.Service, "/"); !r.problems.May(namespace, now) {
				continue
			}
			r.emit(kube.Event{Object: "Service " + f.Service, Warning: true, Reason: reasonServiceHealth,
				Message: f.Err.Error()})
		} else {
			r.warn(reasonHealthz, f.Err.Error())
		}
	}
	r.drifts(&round)
	r.undoes(round.Status.Undone)
	r.failure(&round)
}

// problem makes an Event that regards the object that has it. It has no Reason if Events cannot regard such objects.
// But for what is wrong with a Node, which is the own one, and what clients of this node find, each node finds it.
func problem(p service.Problem) kube.Event {
	e := kube.Event{Warning: true, Message: p.Error()}
	switch kind, _, _ := strings.Cut(p.Object, " "); kind {
	case "Service", "EndpointSlice", "ServiceCIDR":
		e.Object, e.Reason = p.Object, reasonInvalid+kind
		e.Everywhere = p.Cause != service.Unhealthy // other nodes' clients may be answered
	case "Node":
		e.Reason = reasonInvalid + kind
	case "Namespace":
		e.Object, e.Reason = p.Object, reasonShare
	default: // a manifest, or an interface: the log has it
	}
	return e
}

func (r *reporter) drifts(round *engine.Round) {
	n := len(round.Drifts)
	if n == 0 || time.Since(r.drifted) < driftPause {
		return
	}
	r.drifted = time.Now()
	who := cmp.Or(dataplane.Authors(round.ExternalChanges), "another program")
	r.warn(reasonDrift, fmt.Sprintf("%s changed Fairlead's rules; repaired: %s%s", who, round.Drifts[0], andMore(n-1)))
}

// undoes emits an Event when another program keeps undoing the repairs, and another one when it has stopped.
func (r *reporter) undoes(u *engine.Undone) {
	switch {
	case u != nil && u.Rarer && !r.undone:
		r.undone = true
		r.warn(reasonUndone, fmt.Sprintf("%s undoes Fairlead's rules again and again: %d repairs have not held. "+
			"They come every %v at most now; stop that program, or have it leave the rules alone",
			cmp.Or(u.Author, "another program"), u.Repairs, engine.LongestPause))
	case u == nil && r.undone:
		r.undone = false
		r.emit(kube.Event{Reason: reasonHold, Message: "repairs of Fairlead's rules hold again"})
	}
}

func andMore(n int) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf(" and %d more", n)
}

func (r *reporter) failure(round *engine.Round) {
	switch failing := round.Status.Error != ""; {
	case failing && !r.failing:
		r.warn(reasonFailing, round.Status.Error)
	case !failing && r.failing:
		r.emit(kube.Event{Reason: reasonProgramming, Message: "the data plane holds all rows again"})
	}
	r.failing = round.Status.Error != ""
}

// observers are told of rounds one after the other. Metrics alone are told of the rest.
type observers struct {
	*metrics.Metrics
	others []interface{ Round(engine.Round) }
}

// Round implements engine.Observer.
func (o observers) Round(r engine.Round) {
	o.Metrics.Round(r)
	for _, one := range o.others {
		one.Round(r)
	}
}

// beginning waits for the first rules.
type beginning struct {
	inForce chan struct{} // closed once
	once    sync.Once
}

// Round is told of each round of the engine. Rules are in force, too, when the kernel refuses some rows.
func (b *beginning) Round(r engine.Round) {
	if r.Verb == engine.Synced && dataplane.Known(r.Err) {
		b.once.Do(func() { close(b.inForce) })
	}
}
