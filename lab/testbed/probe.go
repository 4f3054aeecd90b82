package testbed

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

// DefaultTimeout is how long a Probe waits that does not say so itself.
const DefaultTimeout = time.Second

// Probe is one attempt to get an answer.
type Probe struct {
	From       Place
	To         netip.AddrPort
	Protocol   model.Protocol // 0: TCP
	Timeout    time.Duration  // of the whole attempt; 0: DefaultTimeout
	SourcePort uint16         // 0: one that was not used lately
	Size       int            // in bytes, of a datagram and of its answer; 0: a few
}

// Result is how a Probe ended.
type Result uint8

const (
	// Answered: a server sent its line.
	Answered Result = iota + 1
	// Refused: a reset, an abort or "port unreachable" came back, or the connection was ended before
	// an answer.
	Refused
	// Unreachable: an ICMP error said that the packet cannot be delivered there (no route, no such neighbour,
	// prohibited). On the addresses of the plan that means: the node let it pass.
	Unreachable
	// TimedOut: nothing came back.
	TimedOut
)

func (r Result) String() string {
	names := [...]string{Answered: "answered", Refused: "refused", Unreachable: "unreachable", TimedOut: "timed out"}
	if int(r) < len(names) && r > 0 {
		return names[r]
	}
	return fmt.Sprintf("result %d", uint8(r))
}

// Outcome is what a Probe saw.
type Outcome struct {
	Result  Result
	Backend string        // the pod that answered
	Source  netip.Addr    // the client's address as the pod saw it
	Port    uint16        // the client's own
	RTT     time.Duration // from before connect to the last event
}

// String says everything but the time and the port.
func (o Outcome) String() string {
	if o.Result == Answered {
		return fmt.Sprintf("%s source %s", o.Backend, o.Source)
	}
	return o.Result.String()
}

// Probe connects, waits for the answer and resets the connection. Whatever the network does is an
// Outcome; an error means that the probe could not be made or that ctx ended.
func (b *Bed) Probe(ctx context.Context, p Probe) (Outcome, error) {
	if p.Protocol == 0 {
		p.Protocol = model.TCP
	}
	if p.Timeout == 0 {
		p.Timeout = DefaultTimeout
	}
	h, err := b.host(p.From)
	if err != nil {
		return Outcome{}, err
	}
	start := time.Now()
	line, err := h.ask(ctx, &p, start.Add(p.Timeout))
	rtt := time.Since(start)
	var o Outcome
	if err == nil {
		o, err = parseAnswer(line)
	} else if o.Result = resultOf(err); o.Result != 0 && ctx.Err() == nil {
		err = nil
	}
	if err == nil {
		o.RTT, o.Port = rtt, p.SourcePort
		return o, nil
	}
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	return Outcome{}, fmt.Errorf("testbed: probe from %s to %s/%s: %w", p.From, p.To, p.Protocol, err)
}

// ask returns the line that a server sends.
func (h *host) ask(ctx context.Context, p *Probe, deadline time.Time) (string, error) {
	f, err := h.connect(ctx, p)
	if err != nil {
		return "", err
	}
	defer closeNow(f)
	if p.Protocol == model.UDP { // sent whatever the time is: nothing makes it wait
		// A datagram that a rule of its own node drops fails with EPERM: that is silence. If the
		// rule refuses it, the refusal is what Read returns.
		question := append([]byte("?\n"), make([]byte, max(p.Size-2, 0))...)
		if _, err := f.Write(question); err != nil && !errors.Is(err, unix.EPERM) {
			return "", err
		}
	}
	defer limit(ctx, f, deadline)()
	answer := make([]byte, max(p.Size, 127)+1)
	n, err := f.Read(answer)
	if err == nil && p.Size != 0 && n != p.Size {
		return "", fmt.Errorf("an answer of %d bytes to a datagram of %d", n, p.Size)
	}
	return strings.TrimRight(string(answer[:n]), "\x00"), err
}

// OfPort is what the node's kernel has of a port of a client: flows of connection tracking and of IPVS, and sockets.
func (b *Bed) OfPort(port uint16) string {
	const list = `grep -hs -e "port=$1 " -e " $2 " /proc/net/nf_conntrack /proc/net/ip_vs_conn; ss -tanH | grep ":$1 "`
	out, _ := b.Command(context.Background(), Node, "sh", "-c", list, "sh", // grep fails if there is nothing
		strconv.Itoa(int(port)), fmt.Sprintf("%04X", port)).CombinedOutput()
	return fmt.Sprintf("of port %d the node's kernel has:\n%s", port, out)
}

func parseAnswer(line string) (Outcome, error) {
	name, from, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
	source, err := netip.ParseAddrPort(from)
	if err != nil {
		return Outcome{}, fmt.Errorf("the answer %q is not a testbed server's", line)
	}
	return Outcome{Result: Answered, Backend: name, Source: source.Addr()}, nil
}

// resultOf is 0 for an error that is not the network's.
func resultOf(err error) Result {
	is := func(targets ...error) bool {
		return slices.ContainsFunc(targets, func(target error) bool { return errors.Is(err, target) })
	}
	switch {
	case is(os.ErrDeadlineExceeded, unix.ETIMEDOUT):
		return TimedOut
	case is(unix.ECONNREFUSED, unix.ECONNRESET, unix.ECONNABORTED, unix.EPIPE, io.EOF):
		return Refused
	case is(unix.EHOSTUNREACH, unix.ENETUNREACH, unix.EACCES, unix.EHOSTDOWN, unix.ENOPROTOOPT):
		return Unreachable
	}
	return 0
}
