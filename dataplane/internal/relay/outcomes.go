package relay

import (
	"errors"
	"net/netip"
	"os"
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
	// maxOutcomes bounds those that wait.
	maxOutcomes = 1 << 10
)

type outcomes struct {
	answers atomic.Bool // are told, too
	waiting chan model.Outcome
}

// Outcomes calls f with those of the time since the last call. Answers are told from the next call on.
func (p *Proxy) Outcomes(answers bool, f func(model.Outcome)) {
	p.outcomes.answers.Store(answers)
	for len(p.outcomes.waiting) > 0 {
		f(<-p.outcomes.waiting)
	}
}

// tell notes the outcome of a call to a backend: an answer, or an error that says something of the backend.
func (p *Proxy) tell(c *Call, backend netip.AddrPort, err error) {
	var r model.Result
	switch {
	case err == nil && p.outcomes.answers.Load():
		r = model.Answered
	case errors.Is(err, unix.ETIMEDOUT), errors.Is(err, os.ErrDeadlineExceeded):
		r = model.Unanswered
	case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETUNREACH):
		r = model.Refused
	default:
		return
	}
	select {
	case p.outcomes.waiting <- model.Outcome{
		To: c.key.AddrPort(), Protocol: c.key.Protocol, Backend: backend, Client: c.client.Addr().WithZone(""), Result: r,
	}:
	default: // those that wait tell it already, or are never asked for
	}
}

// hear tells once if a backend does not answer a call in time. The function that it returns is for the end of the
// question: it tells an answer, or an error that comes before that.
func (p *Proxy) hear(c *Call, backend netip.AddrPort) (end func(error)) {
	late := time.AfterFunc(min(silence, p.options.DialTimeout), func() { p.tell(c, backend, os.ErrDeadlineExceeded) })
	return func(err error) {
		if inTime := late.Stop(); inTime || err == nil {
			p.tell(c, backend, err)
		}
	}
}
