package userspace

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"fairlead.dev/fairlead/dataplane/internal/nfnetlink"
	"fairlead.dev/fairlead/dataplane/internal/tracked"
	"fairlead.dev/fairlead/model"
)

// tracking is what connection tracking knows of single flows. Goroutines of connections share it.
type tracking struct {
	mu   sync.Mutex
	conn *nfnetlink.Socket
}

// original is where a flow was going that comes from a client to our own address: a socket of UDP does not know.
func (t *tracking) original(p model.Protocol, client, own netip.AddrPort) (to netip.AddrPort, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	flow, err := tracked.ByAnswers(t.conn, p, own, client)
	if err == nil && !flow.To.IsValid() {
		err = errors.New("connection tracking does not say")
	}
	if err != nil {
		return to, fmt.Errorf("destination of the flow from %s: %w", client, err)
	}
	return flow.To, nil
}

// forget forgets what an earlier socket sent from an own port to a backend. Otherwise the kernel would replace the
// source of a new socket's packets as it did for the earlier one, by the address of another client.
func (t *tracking) forget(p model.Protocol, own, backend netip.AddrPort) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return tracked.ForgetFrom(t.conn, p, own, backend)
}

func (t *tracking) close() {
	if t != nil && t.conn != nil {
		_ = t.conn.Close() // nothing waits in it
	}
}
