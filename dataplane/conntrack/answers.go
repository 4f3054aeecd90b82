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

// Translated calls a function for each open connection whose destination is translated, with the destination that its
// client asked for. It reads all flows.
func (t *Table) Translated(do func(to netip.AddrPort, p model.Protocol)) error {
	_, err := tracked.List(t.conn, func(f *tracked.Flow) bool {
		if f.To != f.Answers && f.Open() {
			do(f.To, f.Protocol)
		}
		return false
	}, tracked.Filter{})
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EOPNOTSUPP) { // it tracks no connections
		return fmt.Errorf("list tracked connections: %w", err)
	}
	return nil
}
