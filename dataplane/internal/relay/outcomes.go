package relay

import (
	"errors"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

// Outcomes of connections and flows wait here until the engine asks for them:
//
//	asked ─ an error comes first ─► refused
//	  ├─ an answer ─► answered, if those are asked for
//	  └─ a second passes; of UDP the client sends again ─► unanswered, and the proxy goes on waiting

const (
	// silence is for how long a backend may be slow. A kernel sends its SYN again after that.
	silence = time.Second
	// maxOutcomes bounds those that wait. Of more nothing is learned that these do not tell.
	maxOutcomes = 1 << 12
	// staleOutcomes is after how long without a question those that wait are forgotten.
	staleOutcomes = 5 * time.Second
)

type outcomes struct {
	answers atomic.Bool // are told, too

	mu      sync.Mutex
	asked   time.Time
	waiting []model.Outcome
}

// stale reports whether the user of the proxy does not ask, or not any more.
func (o *outcomes) stale(now time.Time) bool { return now.Sub(o.asked) > staleOutcomes }

// Outcomes calls f with those of the time since the last call. Answers are told from the next call on.
func (p *Proxy) Outcomes(answers bool, f func(model.Outcome)) {
	o, now := &p.outcomes, time.Now()
	o.answers.Store(answers)
	o.mu.Lock()
	waiting := o.waiting
	if o.stale(now) {
		waiting = nil
	}
	o.waiting, o.asked = nil, now
	o.mu.Unlock()
	for _, one := range waiting {
		f(one)
	}
}

// tell notes the outcome of a call to a backend.
func (p *Proxy) tell(c *Call, backend netip.AddrPort, r model.Result) {
	o := &p.outcomes
	if r == model.Answered && !o.answers.Load() {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.waiting) == maxOutcomes || o.stale(time.Now()) {
		return
	}
	o.waiting = append(o.waiting, model.Outcome{
		To: c.key.AddrPort(), Protocol: c.key.Protocol, Backend: backend, Client: c.client.Addr().WithZone(""), Result: r,
	})
}

// tellError does so where an error says something of the backend.
func (p *Proxy) tellError(c *Call, backend netip.AddrPort, err error) {
	if errors.Is(err, unix.ETIMEDOUT) {
		p.tell(c, backend, model.Unanswered)
	}
	for _, refused := range []error{unix.ECONNREFUSED, unix.EHOSTUNREACH, unix.ENETUNREACH} {
		if errors.Is(err, refused) {
			p.tell(c, backend, model.Refused)
		}
	}
}

// A question was put to a backend.
type question struct {
	Call
	*Socket
	backend netip.AddrPort
	waited  time.Duration
	told    bool // that there was no answer
}

// hear waits for an answer until so much time has passed since the question, and tells the outcome.
func (p *Proxy) hear(q *question, until time.Duration) error {
	for {
		next := until
		if q.waited < silence {
			next = min(until, silence)
		}
		err := q.Await(next - q.waited)
		switch {
		case err == nil:
			p.tell(&q.Call, q.backend, model.Answered)
			return nil
		case !errors.Is(err, os.ErrDeadlineExceeded):
			if !q.told {
				p.tellError(&q.Call, q.backend, err)
			}
			return err
		}
		if q.waited = next; !q.told && q.waited >= min(silence, p.options.DialTimeout) {
			p.tell(&q.Call, q.backend, model.Unanswered)
			q.told = true
		}
		if q.waited == until {
			return err
		}
	}
}
