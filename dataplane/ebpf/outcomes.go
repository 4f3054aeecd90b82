package ebpf

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"

	"fairlead.dev/fairlead/model"
)

// Programs tell in a ring what becomes of connections. Those for packets see it at the flows that they make. Of sockets
// the kernel's tracing tells, to programs that end with the process. A socket's connection has no flow, so nothing is
// told twice.
//
//	socket: SYN again, reset; connected ─┐
//	packet: again, RST, ICMP; an answer ─┴─► ring ─► Outcomes
//
// A program of type SOCK_OPS in the cgroup would see all sockets' connections, and take 3 % of the time of connect().

// told is what reads the ring.
type told struct {
	*ringbuf.Reader
	of      *sets       // whose ring it is
	traces  []link.Link // of failures
	answers link.Link   // nil: none are wanted, or can be had
}

// Outcomes implements dataplane.Observed.
func (p *Plane) Outcomes(ctx context.Context, answered bool, f func(model.Outcome)) (err error) {
	if p.serve == Behind && p.behind != nil { // else hardly anything is left for it, and each packet would meet its rules
		err = p.behind.Outcomes(ctx, answered, f)
	}
	switch {
	case f == nil:
		p.told.close()
	case p.sets != nil:
		if more := p.outcomes(answered, f); more != nil {
			err = errors.Join(err, fmt.Errorf("ebpf: read outcomes: %w", more))
		}
	}
	return err
}

func (p *Plane) outcomes(answered bool, f func(model.Outcome)) (err error) {
	t := &p.told
	if t.of != p.sets {
		err = p.openTold()
	}
	if err == nil {
		err = p.tellAnswers(answered)
	}
	if err != nil || t.AvailableBytes() == 0 {
		return err
	}
	var record ringbuf.Record
	for range t.BufferSize() { // programs may tell more meanwhile, for ever
		switch err := t.ReadInto(&record); {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return nil
		case err != nil:
			return err
		}
		var o objectsOutcome
		if _, err := binary.Decode(record.RawSample, binary.NativeEndian, &o); err != nil {
			return err
		}
		f(o.outcome())
	}
	return nil
}

// openTold begins to read what the programs tell that are loaded.
func (p *Plane) openTold() (err error) {
	t := &p.told
	t.close()
	if t.Reader, err = ringbuf.NewReader(p.sets.outcomes); err != nil {
		return err
	}
	t.SetDeadline(time.Now()) // it does not wait
	t.of = p.sets
	if p.sockets == nil {
		return nil
	}
	for _, name := range []string{objectsProgResends, objectsProgIsReset} {
		if p.cannotTell != nil {
			break
		}
		var trace link.Link
		if trace, p.cannotTell = link.AttachTracing(link.TracingOptions{Program: p.sockets.Programs[name]}); trace != nil {
			t.traces = append(t.traces, trace)
		}
	}
	if p.cannotTell != nil {
		p.say("the kernel does not tell what becomes of connections that sockets open, so backends are judged by those of "+
			"others alone; it needs Linux 5.12 and CONFIG_DEBUG_INFO_BTF", "error", p.cannotTell)
	}
	return nil
}

// tellAnswers has the programs tell answers, or not.
func (p *Plane) tellAnswers(wanted bool) (err error) {
	var word uint32
	if wanted {
		word = 1
	}
	atomic.StoreUint32(&p.sets.memory.Answers, word)
	t := &p.told
	switch {
	case !wanted && t.answers != nil:
		err, t.answers = t.answers.Close(), nil
	case wanted && t.answers == nil && p.sockets != nil && p.cannotTell == nil:
		t.answers, err = link.AttachTracing(link.TracingOptions{Program: p.sockets.Programs[objectsProgIsAnswered]})
	}
	return err
}

func (o objectsOutcome) outcome() model.Outcome {
	return model.Outcome{
		To: o.To.addrPort(), Protocol: model.Protocol(o.Protocol), Backend: o.Backend.addrPort(),
		Client: o.Client.addr(), Result: model.Result(o.Result), // enum result has the same numbers
	}
}

func (t *told) close() {
	if t.Reader != nil {
		_ = t.Close() // of memory and files that are open it cannot fail
	}
	if t.answers != nil {
		t.traces = append(t.traces, t.answers)
	}
	for _, l := range t.traces {
		_ = l.Close()
	}
	*t = told{}
}
