package chaos

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// action is what an event does.
type action string

const (
	die       action = "dies"
	revive    action = "answers again"
	slow      action = "becomes slow"
	fast      action = "is fast again"
	remove    action = "leaves the EndpointSlices"
	add       action = "is in the EndpointSlices again"
	partition action = "node-b is cut off"
	heal      action = "node-b is back"
	kill      action = "kill -9 of the agent"
	start     action = "start of the agent"
	switches  action = "fairlead switch"
)

// The ways to die.
var deaths = []string{"drops all packets", "closes its ports", "loses its link"}

// event is one step of a plan.
type event struct {
	at  time.Duration
	do  action
	pod int    // of those that may fail
	how string // of deaths; of a switch or a start: the mode
}

func (e event) String() string {
	switch e.do {
	case die:
		return fmt.Sprintf("%s %s", pods[e.pod], e.how)
	case revive, slow, fast, remove, add:
		return fmt.Sprintf("%s %s", pods[e.pod], e.do)
	case start, switches:
		return fmt.Sprintf("%s: %s", e.do, e.how)
	}
	return string(e.do)
}

// planner makes the events of a plan. It knows until when each thing is out of order.
type planner struct {
	*rand.Rand
	modes       []string
	now         time.Duration
	busy        [len(pods)]time.Duration
	dead        [len(pods)]time.Duration
	cut, absent time.Duration // the other node; the agent
	mode        string
	events      []event
}

// newPlan is what happens in a time, by a seed. The first mode is the one at the beginning.
func newPlan(seed uint64, d time.Duration, modes []string) []event {
	p := &planner{Rand: rand.New(rand.NewPCG(seed, 0)), modes: modes, mode: modes[0]}
	for p.now = time.Second; p.now < d; p.now += p.between(0.5, 4) {
		switch n := p.IntN(12); {
		case n < 5:
			p.death()
		case n < 7:
			p.slowness()
		case n < 8:
			p.partition()
		case n < 10:
			p.agentDies()
		default:
			p.modeChanges()
		}
	}
	slices.SortStableFunc(p.events, func(a, b event) int { return cmp.Compare(a.at, b.at) })
	return slices.DeleteFunc(p.events, func(e event) bool { return e.at > d })
}

// between is a random time, from and to a number of seconds.
func (p *planner) between(from, to float64) time.Duration {
	return time.Duration((from + (to-from)*p.Float64()) * float64(time.Second)).Round(time.Millisecond)
}

func (p *planner) add(at time.Duration, do action, pod int, how string) {
	p.events = append(p.events, event{at, do, pod, how})
}

// death has a pod die. One on the node always lives. The API server removes it late or never.
func (p *planner) death() {
	i, how := p.IntN(len(pods)), deaths[p.IntN(len(deaths))]
	back, gone, late := p.now+p.between(4, 60), p.now+p.between(10, 40), p.between(0, 6)
	never := p.IntN(3) == 0
	if p.busy[i] > p.now || i < 2 && p.dead[1-i] > p.now {
		return
	}
	p.busy[i], p.dead[i] = back, back
	p.add(p.now, die, i, how)
	p.add(back, revive, i, how)
	if !never && gone < back {
		p.add(gone, remove, i, "")
		p.add(back+late, add, i, "")
		p.busy[i] = back + late
	}
}

func (p *planner) slowness() {
	i, back := p.IntN(len(pods)), p.now+p.between(5, 30)
	if p.busy[i] > p.now {
		return
	}
	p.busy[i] = back
	p.add(p.now, slow, i, "")
	p.add(back, fast, i, "")
}

func (p *planner) partition() {
	back := p.now + p.between(3, 30)
	if p.cut > p.now {
		return
	}
	p.cut = back
	p.add(p.now, partition, 0, "")
	p.add(back, heal, 0, "")
}

// agentDies has it killed, and started again: now and then in another mode.
func (p *planner) agentDies() {
	back, other, change := p.now+p.between(0, 5), p.modes[p.IntN(len(p.modes))], p.IntN(3) == 0
	if p.absent > p.now {
		return
	}
	if change {
		p.mode = other
	}
	p.absent = back
	p.add(p.now, kill, 0, "")
	p.add(back, start, 0, p.mode)
}

func (p *planner) modeChanges() {
	to := p.modes[p.IntN(len(p.modes))]
	if p.absent > p.now || to == p.mode {
		return
	}
	p.mode = to
	p.add(p.now, switches, 0, to)
}
