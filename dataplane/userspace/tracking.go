package userspace

import (
	"fmt"
	"net/netip"

	"fairlead.dev/fairlead/dataplane/internal/relay"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/share"
	"fairlead.dev/fairlead/internal/tracked"
	"fairlead.dev/fairlead/model"
)

// tracking is what connection tracking knows of single flows. Goroutines of connections share it: clients take turns.
type tracking struct {
	gate *relay.Gate // one at a time
	conn *nfnetlink.Socket
}

// openTracking is for the network namespace of the calling thread.
func openTracking() (*tracking, error) {
	conn, err := nfnetlink.Dial()
	return &tracking{conn: conn, gate: relay.NewGate(1)}, err
}

// wait waits for a client's turn.
func (t *tracking) wait(client netip.Addr) {
	var place share.Place
	turn := make(chan struct{})
	if !t.gate.Enter(&place, share.Owner{Client: share.At(client)}, func() { close(turn) }) {
		<-turn
	}
}

// original is where a flow was going that comes from a client to our own address: a socket of UDP does not know.
func (t *tracking) original(p model.Protocol, client, own netip.AddrPort) (to netip.AddrPort, err error) {
	t.wait(client.Addr())
	defer t.gate.Pass()
	flow, err := tracked.ByAnswers(t.conn, tracked.Tuple{Protocol: p, From: own, To: client})
	if err != nil {
		return to, fmt.Errorf("destination of the flow from %s: %w", client, err)
	}
	return flow.To, nil
}

// forget forgets what an earlier socket sent from an own port to a backend. Otherwise the kernel would replace the
// source of a new socket's packets as it did for the earlier one, by the address of another client.
func (t *tracking) forget(c relay.Call, own, backend netip.AddrPort) error {
	t.wait(c.Client().Addr())
	defer t.gate.Pass()
	return tracked.ForgetFrom(t.conn, tracked.Tuple{Protocol: c.Protocol(), From: own, To: backend})
}

func (t *tracking) close() {
	if t != nil && t.conn != nil {
		_ = t.conn.Close() // nothing waits in it
	}
}
