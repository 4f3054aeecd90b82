package conntrack

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/tracked"
	"fairlead.dev/fairlead/model"
)

// Table asks connection tracking.
type Table struct{ conn *nfnetlink.Socket }

// OpenTable is about the network namespace of the calling thread. The caller closes it.
func OpenTable() (*Table, error) {
	conn, err := nfnetlink.Dial()
	return &Table{conn}, err
}

// Close gives the socket back.
func (t *Table) Close() { _ = t.conn.Close() } // nothing waits in it

// Answer is the address that answers on a flow, and the flow's mark.
type Answer struct {
	From netip.AddrPort
	Mark uint32
}

// Answers returns the address that answers the flow of a client to a destination, and the flow's mark. ok is false if
// connection tracking does not know the flow. The cost does not depend on the number of flows.
func (t *Table) Answers(p model.Protocol, from, to netip.AddrPort) (who Answer, ok bool, err error) {
	flow, err := tracked.BySender(t.conn, tracked.Tuple{Protocol: p, From: from, To: to})
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) { // or it is off
		return who, false, nil
	}
	if err != nil {
		return who, false, fmt.Errorf("tracked flow from %s to %s: %w", from, to, err)
	}
	return Answer{flow.Answers, flow.Mark}, true, nil
}

// Needed reports whether an open connection needs the hooks of NAT. That is one to a destination of ours that is
// translated. Or the kernel has given it another source port, because its answers looked like those of such a one.
//
// If there is none, Needed has those forgotten that have ended: without the hooks the kernel drops a new connection
// whose answers look like theirs (__nf_conntrack_confirm). It reads all flows.
func (t *Table) Needed(ours func(to netip.AddrPort, p model.Protocol) bool) (needed bool, err error) {
	var ended []tracked.Tuple
	err = tracked.Filter{}.Each(t.conn, func() { ended = nil }, func(f *tracked.Flow) {
		moved := f.From != f.Back && f.From.Addr() == f.Back.Addr()
		switch {
		case needed, !moved && (f.To == f.Answers || !ours(f.To, f.Protocol)):
		case f.Open():
			needed = true
		default:
			ended = append(ended, tracked.Tuple{Protocol: f.Protocol, From: f.From, To: f.To})
		}
	})
	if needed || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) { // or it tracks no connections
		return needed, nil
	}
	if err == nil {
		err = t.forget(ended)
	}
	if err != nil {
		return false, fmt.Errorf("tracked connections that are translated: %w", err)
	}
	return false, nil
}

func (t *Table) forget(flows []tracked.Tuple) (err error) {
	for _, flow := range flows {
		err = errors.Join(err, tracked.ForgetFrom(t.conn, flow))
	}
	return err
}
