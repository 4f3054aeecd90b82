package daemon

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/testbed/nstest"
	"fairlead.dev/fairlead/model"
)

const affinityRows = `
backend default/web cluster 10.244.1.11:8080
backend default/web cluster 10.244.2.13:8080
frontend 10.96.0.10:80/tcp any forward default/web cluster snat offcluster
pool default/web cluster affinity 3h0m0s
`

// A plane that starts after another plane's process has ended learns its sessions, also those of clients that came
// until its rules were removed.
func TestHandover_sessions(t *testing.T) {
	t.Parallel()
	names := []string{nftablesPlane, iptablesPlane, userspacePlane}
	for _, from := range names {
		for _, to := range names {
			if from != to {
				t.Run(from+" to "+to, func(t *testing.T) {
					t.Parallel()
					nstest.Run(t, func(t *testing.T) {
						if err := handOverSessions(t, from, to); err != nil {
							t.Error(err)
						}
					})
				})
			}
		}
	}
}

func handOverSessions(t *testing.T, from, to string) error {
	ctx := context.Background()
	s, err := model.ParseState(affinityRows)
	if err == nil { // mode userspace has routes there
		err = netlink.LinkSetUp(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "lo"}})
	}
	if err != nil {
		return err
	}
	config := dataplane.Config{Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	old, err := planeSettings{name: from, mark: 1 << 14}.open(config)
	if err != nil {
		return err
	}
	clients := clientsOf(s)
	if err := old.Sync(ctx, s); err != nil {
		return errors.Join(err, old.Close())
	}
	_, err = old.Dataplane.Learn(ctx, s, clients)
	if err := errors.Join(err, old.Close()); err != nil {
		return err
	}
	h, err := startPlane(config.Log, planeSettings{name: to, mark: 1 << 14}, drivers(), nil)
	if err != nil {
		return err
	}
	defer h.Close()
	if err := h.Sync(ctx, s); err != nil {
		return err
	}
	known := map[netip.Addr]netip.AddrPort{}
	for m, err := range h.Sessions(ctx, s) {
		if err != nil {
			return err
		}
		known[m.Client] = m.Backend
	}
	for m, err := range clients {
		if err != nil {
			return err
		}
		if known[m.Client] != m.Backend {
			t.Errorf("%s is at %s, not at %s", m.Client, known[m.Client], m.Backend)
		}
	}
	return h.Remove(ctx)
}

// clientsOf are some of a pool, at all of its backends.
func clientsOf(s *model.State) iter.Seq2[dataplane.Session, error] {
	return func(yield func(dataplane.Session, error) bool) {
		id := model.PoolID{Service: "default/web"}
		backends := s.Pools[id].Backends
		for i := range 20 {
			m := dataplane.Session{
				Pool: id, Client: netip.MustParseAddr(fmt.Sprintf("192.0.2.%d", 10+i)),
				Backend: backends[i/3%len(backends)].AddrPort(), Until: time.Now().Add(time.Hour),
			}
			if !yield(m, nil) {
				return
			}
		}
	}
}
