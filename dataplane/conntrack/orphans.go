package conntrack

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/namespace"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/internal/tracked"
	"fairlead.dev/fairlead/model"
)

// orphans has open connections reset whose backend is gone and does not acknowledge what it was sent.
//
//	ResetOrphans ─► a goroutine lists flows to backends that are gone: unacknowledged, and silent? ─► set "orphans"
//	                the client's next packet (forward, output) ─► in the set? ─► reset
//
// Connection tracking notes whether all data of the client is acknowledged, and when a packet of the flow came last. A
// backend that lives acknowledges within a fraction of a second. A client that has no answer sends again, ever later: a
// pause of two seconds says that several packets had none. An idle connection has nothing unacknowledged.
//
// Of a connection that leaves a flowtable, connection tracking no longer knows what is acknowledged. It notes who has
// sent since, and has a shorter timeout for a client that has sent the same several times.
//
// The tables are there while there are orphans. They are the socket's own, and go with the process.
type orphans struct {
	aside
	looks   *looks
	network namespace.Namespace
	relayed uint32       // the mark of flows that are the process's own
	ruleset *nft.Ruleset // nil: there are no tables
	tables  []*nft.Table
	until   map[orphan]time.Time // the elements of the sets
}

// orphan is a connection, by its client and its backend.
type orphan struct{ client, backend netip.AddrPort }

const (
	// silence is how long ago the last packet came, at least.
	silence = 2 * time.Second
	// orphanStays is longer than any pause until a client sends again (TCP_RTO_MAX).
	orphanStays = 150 * time.Second
	maxOrphans  = 1 << 14
	orphanSet   = "orphans"
	// A look at a hundred thousand flows takes 0.05 s, and 0.4 s if backends have many ports. After a look comes a rest,
	// orphanRest times as long.
	orphanRest = 50
)

// ResetOrphans implements dataplane.Observed.
func (p *plane) ResetOrphans(ctx context.Context, gone dataplane.Gone) (int, error) {
	n, err := p.Dataplane.ResetOrphans(ctx, gone)
	gone = maps.Clone(gone)
	found, failed := p.orphans.begin(func() (int, error) { return p.orphans.look(gone) })
	if failed != nil {
		failed = fmt.Errorf("reset connections to backends that are gone: %w", failed)
	}
	say(p.config, "resetting connections to backends that are gone and do not acknowledge data", found)
	return n + found, errors.Join(err, failed)
}

func (o *orphans) look(gone dataplane.Gone) (int, error) {
	o.looks.Lock()
	defer o.looks.Unlock()
	begun := time.Now()
	maps.DeleteFunc(o.until, func(_ orphan, until time.Time) bool { return begun.After(until) })
	found, err := o.find(gone)
	switch {
	case err != nil:
	case len(found) > 0:
		err = o.reset(found)
	case len(o.until) == 0:
		err = o.closeTables()
	}
	o.next = time.Now().Add(orphanRest * time.Since(begun))
	return len(found), err
}

// find returns the orphans that are not in the sets.
func (o *orphans) find(gone dataplane.Gone) (found []orphan, err error) {
	renewed, established, err := renewed(o.network)
	if err != nil || len(gone) == 0 {
		return nil, err
	}
	_, err = tracked.List(o.looks.conntrack, func(f *tracked.Flow) bool {
		_, is := gone[f.Answers]
		who := orphan{f.From, f.Answers}
		unheard := f.Left < renewed-silence && (f.Unheard || f.Resumed && established > renewed)
		if is && f.To != f.Answers && f.Mark&o.relayed == 0 && unheard &&
			o.until[who].IsZero() && len(o.until)+len(found) < maxOrphans {
			found = append(found, who)
		}
		return false
	}, flowsTo(maps.Keys(gone))...)
	return found, err
}

// flowsTo are filters for the flows of TCP that may go to backends. As in look, there are few.
func flowsTo(backends iter.Seq[netip.AddrPort]) (filters []tracked.Filter) {
	ports := map[uint16]bool{}
	for b := range backends {
		if !ports[b.Port()] {
			ports[b.Port()] = true
			filters = append(filters, tracked.Filter{Protocol: model.TCP, Answers: netip.AddrPortFrom(netip.Addr{}, b.Port())})
		}
	}
	if len(filters) > maxLooks {
		return []tracked.Filter{{Protocol: model.TCP}}
	}
	return filters
}

// renewed is for how long a packet has a connection remembered: one that has unacknowledged data, at least, and others.
func renewed(network namespace.Namespace) (least, established time.Duration, err error) {
	least = math.MaxInt64
	err = network.Do(func() error {
		for _, timeout := range []string{"unacknowledged", "max_retrans", "established"} {
			text, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_" + timeout)
			if err == nil {
				established, err = time.ParseDuration(strings.TrimSpace(string(text)) + "s") // at last
			}
			if err != nil {
				return err
			}
			least = min(least, established)
		}
		return nil
	})
	return least, established, err
}

// reset has the next packet of each client answered by a reset.
func (o *orphans) reset(found []orphan) (err error) {
	if o.ruleset == nil {
		o.ruleset, o.tables, err = nft.Owner{Network: o.network, Changed: o.changed}.
			Open("fairlead-orphans", orphanSets, resetOrphans)
	}
	if err == nil {
		err = addFlows(o.ruleset, o.tables, found, orphanStays)
	}
	if err != nil {
		return errors.Join(err, o.closeTables())
	}
	for _, of := range found {
		o.until[of] = time.Now().Add(orphanStays)
	}
	return nil
}

// addFlows puts flows into the first set of tables.
func addFlows(r *nft.Ruleset, tables []*nft.Table, flows []orphan, last time.Duration) error {
	tx := &nft.Transaction{}
	for _, t := range tables {
		t.Tx = tx
		for _, f := range flows {
			if t.Family.Mine(f.backend.Addr()) {
				t.Timed(t.Sets[0], f.key(), nil, nft.Life{Lasts: last, Left: last})
			}
		}
	}
	return r.Send(tx, tx.Steps)
}

// key is that of a flow in sets.
func (o orphan) key() []byte {
	return append(nft.EncodeBackend(o.client), nft.EncodeBackend(o.backend)...)
}

func flowKey(f nft.Family) []nft.Field { return []nft.Field{f.Address, nft.Port, f.Address, nft.Port} }

// inSet goes on with packets of flows in a set, which has what clients asked for, or else what answers them.
func inSet(f nft.Family, set string, asked bool) []any {
	n, address, port := f.Address.Words(), f.CtSource, expr.CtKeyPROTOSRC
	if asked {
		address, port = f.CtDestination, expr.CtKeyPROTODST
	}
	return append(nft.IsProtocol(unix.IPPROTO_TCP),
		nft.Tuple{Key: f.CtSource, Register: nft.Word(0)},
		nft.Tuple{Key: expr.CtKeyPROTOSRC, Register: nft.Word(n)},
		nft.Tuple{Key: address, Register: nft.Word(n + 1), Reply: !asked},
		nft.Tuple{Key: port, Register: nft.Word(2*n + 1), Reply: !asked},
		nft.In(set))
}

// fromClient goes on with packets of clients.
func fromClient() []any {
	return []any{&expr.Ct{Key: expr.CtKeyDIRECTION, Register: nft.Word(0)}, nft.Equals([]byte{0})}
}

func orphanSets(f nft.Family) []*nft.Set {
	return []*nft.Set{{Name: orphanSet, Flags: unix.NFT_SET_TIMEOUT, Key: flowKey(f)}}
}

// resetOrphans answer a packet of a client, which has its backend's address by now.
func resetOrphans(f nft.Family) []nft.Chain {
	rule := nft.NewRule("reset", fromClient(), inSet(f, orphanSet, false), &expr.Reject{Type: unix.NFT_REJECT_TCP_RST})
	return []nft.Chain{
		nft.FilterChain("forward", unix.NF_INET_FORWARD, 0, rule), nft.FilterChain("output", unix.NF_INET_LOCAL_OUT, 0, rule),
	}
}

func (o *orphans) closeTables() (err error) {
	if o.ruleset != nil {
		err = o.ruleset.Close()
	}
	o.ruleset, o.tables = nil, nil
	clear(o.until)
	return err
}
