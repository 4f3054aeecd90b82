package iptables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/model"
)

// Sessions implements dataplane.Handover. The names of ipsets tell whose they are.
func (p *Plane) Sessions(_ context.Context, s *model.State) iter.Seq2[dataplane.Session, error] {
	return dataplane.ListSessions("iptables", func(f func(dataplane.Session)) error {
		return p.ipsets.eachSession(setsFor(s), func(_ string, m dataplane.Session) { f(m) })
	})
}

// setsFor are the ipsets that the rules for s refer to.
func setsFor(s *model.State) map[string]setUse {
	return setsOf(s.Pools, func(yield func(entry) bool) {
		for key, f := range s.Frontends {
			if f.Verdict == model.Forward && !yield(entryOf(key, f)) {
				return
			}
		}
	})
}

// eachSession calls f with the clients of backends, and the ipset that has each.
func (s *ipsets) eachSession(sets map[string]setUse, f func(set string, m dataplane.Session)) error {
	if len(sets) == 0 {
		return nil
	}
	found, err := s.list()
	if err != nil {
		return err
	}
	for _, name := range found {
		use, ok := sets[name]
		if !ok || use.group() {
			continue
		}
		if err := s.fault("ipset list"); err != nil {
			return err
		}
		now := time.Now()
		err := s.clients(name, func(client netip.Addr, left time.Duration) {
			f(name, dataplane.Session{Pool: use.pool, Client: client, Backend: use.backend, Until: now.Add(left)})
		})
		if err != nil {
			return fmt.Errorf("ipset %s: %w", name, err)
		}
	}
	return nil
}

// clients calls f with what an ipset has, and for how long.
func (s *ipsets) clients(name string, f func(client netip.Addr, left time.Duration)) error {
	return s.conn.Dump(nfnetlink.IPSet(nl.IPSET_CMD_LIST, name, func(attrs []byte) {
		nfnetlink.Attributes(nfnetlink.Attribute(attrs, nl.IPSET_ATTR_ADT), func(_ uint16, entry []byte) {
			address := nfnetlink.Attribute(entry, nl.IPSET_ATTR_IP)
			left := nfnetlink.Attribute(entry, nl.IPSET_ATTR_TIMEOUT)
			nfnetlink.Attributes(address, func(_ uint16, b []byte) {
				if a, ok := netip.AddrFromSlice(b); ok && len(left) == 4 {
					f(a, time.Duration(binary.BigEndian.Uint32(left))*time.Second)
				}
			})
		})
	}))
}

// Learn implements dataplane.Handover.
func (p *Plane) Learn(
	_ context.Context, s *model.State, others iter.Seq2[dataplane.Session, error],
) (n int, err error) {
	if p.families == nil {
		return p.learned.Keep(s, others)
	}
	return dataplane.Take(s, others, p.taker(p.families))
}

// taker takes what others remember in.
func (p *Plane) taker(families []*familyState) dataplane.Taker {
	return func(others *dataplane.Sessions) (int, error) {
		sets := map[string]setUse{}
		for _, f := range families {
			maps.Copy(sets, f.sets)
		}
		n, err := p.ipsets.takeIn(sets, others)
		if err != nil {
			err = fmt.Errorf("iptables: take over sessions of another data plane: %w", err)
		}
		return n, err
	}
}

// choice is what a client may have chosen.
type choice struct {
	pool    model.PoolID
	backend netip.AddrPort
}

// client is one of a pool.
type client struct {
	pool model.PoolID
	addr netip.Addr
}

// takeIn puts clients into the sets of their backends and of the groups of these, and takes them out of others.
//
//	another plane: client 10.1.2.3 has backend B ─► the set of B, the sets of the groups of B: added
//	own sets:      client 10.1.2.3 has backend A ─► the set of A, unless the own entry is newer: deleted
//
// Rules ask the sets in some order. A client in two sets would get the first one's backend, so a superseded entry must
// go.
func (s *ipsets) takeIn(sets map[string]setUse, others *dataplane.Sessions) (n int, err error) {
	previous := map[client][]string{}
	err = s.eachSession(sets, func(set string, own dataplane.Session) {
		if others.Supersedes(own) {
			of := client{own.Pool, own.Client}
			previous[of] = append(previous[of], set)
		}
	})
	if err != nil {
		return 0, err
	}
	homes := homesOf(sets)
	add, remove := s.batches(nl.IPSET_CMD_ADD), s.batches(nl.IPSET_CMD_DEL)
	for m := range others.All() {
		home, ok := homes[choice{m.Pool, m.Backend}]
		if !ok {
			continue
		}
		n++
		for _, set := range home {
			err = errors.Join(err, add.entry(set, m.Client, time.Until(m.Until)))
		}
		for _, set := range previous[client{m.Pool, m.Client}] {
			if !slices.Contains(home, set) {
				err = errors.Join(err, remove.entry(set, m.Client, 0))
			}
		}
	}
	return n, errors.Join(err, add.flush(), remove.flush())
}

// homesOf are the sets that have the clients of a backend.
func homesOf(sets map[string]setUse) map[choice][]string {
	homes, of := map[choice][]string{}, map[string]choice{}
	for name, use := range sets {
		if !use.group() {
			of[name] = choice{use.pool, use.backend}
			homes[of[name]] = append(homes[of[name]], name)
		}
	}
	for name, use := range sets {
		for _, member := range use.members {
			homes[of[member]] = append(homes[of[member]], name)
		}
	}
	return homes
}

// batches send many entries at a time to sets.
type batches struct {
	*ipsets
	command uint16
	pending map[string]*nfnetlink.Encoder
}

// batchSize is how many bytes the entries of a message may have; the length of an attribute is a uint16.
const batchSize = 1<<16 - 512

func (s *ipsets) batches(command uint16) *batches {
	return &batches{s, command, map[string]*nfnetlink.Encoder{}}
}

// entry adds a client, for so long, or deletes it. That there is one, or none, is no error.
func (b *batches) entry(set string, client netip.Addr, left time.Duration) error {
	e := b.pending[set]
	if e == nil {
		e = &nfnetlink.Encoder{}
		b.pending[set] = e
	}
	kind := uint16(nl.IPSET_ATTR_IPADDR_IPV4)
	if client.Is6() {
		kind = nl.IPSET_ATTR_IPADDR_IPV6
	}
	data := e.Open(nl.IPSET_ATTR_DATA)
	ip := e.Open(nl.IPSET_ATTR_IP)
	e.Bytes(kind|unix.NLA_F_NET_BYTEORDER, client.AsSlice())
	e.Close(ip)
	if left > 0 {
		seconds := uint32(max(left.Round(time.Second).Seconds(), 1))
		e.Uint32(nl.IPSET_ATTR_TIMEOUT|unix.NLA_F_NET_BYTEORDER, seconds)
	}
	e.Close(data)
	if len(e.B) < batchSize {
		return nil
	}
	return b.send(set)
}

func (b *batches) flush() error {
	var errs []error
	for set := range b.pending {
		errs = append(errs, b.send(set))
	}
	return errors.Join(errs...)
}

func (b *batches) send(set string) error {
	entries := b.pending[set]
	delete(b.pending, set)
	if err := b.fault("ipset change"); err != nil {
		return err
	}
	r := nfnetlink.IPSet(b.command, set, nil)
	r.Filter.Uint32(nl.IPSET_ATTR_LINENO|unix.NLA_F_NET_BYTEORDER, 0) // it is asked for where there are many
	list := r.Filter.Open(nl.IPSET_ATTR_ADT)
	r.Filter.B = append(r.Filter.B, entries.B...)
	r.Filter.Close(list)
	if err := b.conn.Do(r); err != nil {
		return fmt.Errorf("change ipset %s: %w", set, err)
	}
	return nil
}
