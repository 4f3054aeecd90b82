package ipvs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/nfnetlink"
	"fairlead.dev/fairlead/model"
)

// remains is what this data plane, in whatever process and with whatever Options, has left in a network namespace. To
// look for it loads no module and makes no table.
type remains struct {
	*Plane
	tables []*table // those that exist
	tx     transaction
}

// findRemains looks at the network namespace of the calling thread.
func findRemains(c dataplane.Config) (r *remains, err error) {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	r = &remains{Plane: &Plane{config: c}}
	if err := r.open(); err != nil {
		return nil, errors.Join(fmt.Errorf("ipvs: %w", err), r.Close())
	}
	return r, nil
}

func (r *remains) open() (err error) {
	if r.conn, err = nfnetlink.Dial(); err != nil {
		return err
	}
	if r.locals, err = openLocals(Options{}, r.config.Log, r.fault); err != nil {
		return err
	}
	if err = r.locals.loadAll(); err != nil {
		return err
	}
	for _, f := range []family{ipv4, ipv6} {
		t := newTable(f, r.config.Mark, &r.tx)
		err := r.load(t)
		if errors.Is(err, unix.EINVAL) { // a kernel without nf_tables
			return nil
		}
		if err != nil {
			return err
		}
		if t.exists {
			r.tables = append(r.tables, t)
		}
	}
	return nil
}

func (r *remains) none() bool {
	return len(r.tables)+len(r.locals.held) == 0 && r.locals.dummy.link == nil
}

// servers are the virtual servers that are left.
func (r *remains) servers() (ours []serverKey, err error) {
	if _, err := os.Stat("/proc/thread-self/net/ip_vs"); err != nil || r.none() {
		return nil, nil
	}
	if r.director == nil {
		if r.director, err = openDirector(r.fault); err != nil {
			return nil, err
		}
	}
	all, err := r.director.servers()
	for key := range all {
		if r.owns(key) {
			ours = append(ours, key)
		}
	}
	return ours, err
}

func (r *remains) owns(key serverKey) bool {
	for _, t := range r.tables {
		if t.v6() == key.v6 && key.mark == 0 && t.recorded(key) {
			return true
		}
	}
	return key.mark&markMask == markBits
}

// clear deletes everything, whoever uses it: the record of what is ours goes last.
func (r *remains) clear() error {
	keys, err := r.servers()
	if err != nil {
		return err
	}
	if err := r.locals.clear(); err != nil {
		return err
	}
	var requests []request
	for _, key := range keys {
		requests = append(requests, deleteServer(key, func() {}))
	}
	if err := r.perform(requests); err != nil {
		return err
	}
	r.tx = transaction{}
	for _, t := range r.tables {
		t.deleteTable()
	}
	return r.commit(&r.tx)
}

func (r *remains) perform(requests []request) error {
	if len(requests) == 0 {
		return nil
	}
	refused, err := r.director.perform(requests)
	return errors.Join(append(refused, err)...)
}

// Traces tells what this data plane, with whatever Options, has left in the network namespace of the calling thread.
func Traces() (t dataplane.Traces, err error) {
	r, err := findRemains(dataplane.Config{})
	if err != nil {
		return t, err
	}
	t.Rules = !r.none()
	return t, r.Close()
}

// Clean deletes that. Connections through IPVS end.
func Clean(_ context.Context, c dataplane.Config) error {
	r, err := findRemains(c)
	if err != nil {
		return err
	}
	if err = r.clear(); err != nil {
		err = fmt.Errorf("ipvs: %w", err)
	}
	return errors.Join(err, r.Close())
}

// Retire is for when another data plane is in force. IPVS takes nothing new, and goes on with the connections that it
// has; the result is how many. When it is called again and there are none, it does what Clean does.
func Retire(_ context.Context, c dataplane.Config) (connections int, err error) {
	r, err := findRemains(c)
	if err != nil {
		return 0, err
	}
	connections, err = r.retire()
	if err == nil && connections == 0 {
		err = r.clear()
	}
	if err != nil {
		err = fmt.Errorf("ipvs: %w", err)
	}
	return connections, errors.Join(err, r.Close())
}

func (r *remains) retire() (connections int, err error) {
	keys, err := r.servers()
	if err != nil {
		return 0, err
	}
	for _, t := range r.tables {
		t.hollow()
	}
	if err := r.commit(&r.tx); err != nil {
		return 0, err
	}
	var requests []request
	for _, key := range keys {
		reals, err := r.director.reals(key)
		if err != nil {
			return 0, err
		}
		n, serves := 0, false
		for _, have := range reals {
			n += int(have.connections)
			if have.weight != 0 {
				serves = true
				requests = append(requests, realRequest(cmdSetDest, key, real{addr: have.addr}, func() {}))
			}
		}
		if n == 0 && !serves {
			requests = append(requests, deleteServer(key, func() {}))
		}
		if serves { // then somebody may have come since
			n = max(n, 1)
		}
		connections += n
	}
	return connections, r.perform(requests)
}

// hollow leaves nothing of a table but the record of which virtual servers are ours.
func (t *table) hollow() {
	if len(t.chains) == 0 {
		return
	}
	t.tx.begin(unix.NFT_MSG_DELRULE, 0, t) // of all chains
	t.tx.Text(unix.NFTA_RULE_TABLE, t.name)
	t.tx.end()
	t.tx.join()
	for i, s := range t.sets {
		if i == virtualServers || !t.foundSets[s.name] {
			continue
		}
		t.tx.begin(unix.NFT_MSG_DELSET, 0, t)
		t.tx.Text(unix.NFTA_SET_TABLE, t.name)
		t.tx.Text(unix.NFTA_SET_NAME, s.name)
		t.tx.end()
		t.tx.join()
	}
	for name := range t.chains {
		t.tx.begin(unix.NFT_MSG_DELCHAIN, 0, t)
		t.tx.Text(unix.NFTA_CHAIN_TABLE, t.name)
		t.tx.Text(unix.NFTA_CHAIN_NAME, name)
		t.tx.end()
		t.tx.join()
	}
	t.tx.steps[len(t.tx.steps)-1].joined = false
}

// Owns tells, in the network namespace of the calling thread, which virtual servers are of this data plane: some of
// them may have been others'.
func Owns() (func(a netip.AddrPort, protocol uint8) bool, error) {
	r, err := findRemains(dataplane.Config{})
	if err != nil {
		return nil, err
	}
	owns := func(a netip.AddrPort, protocol uint8) bool {
		return r.owns(serverKey{addr: a.Addr(), port: a.Port(), protocol: model.Protocol(protocol), v6: a.Addr().Is6()})
	}
	return owns, r.Close()
}
