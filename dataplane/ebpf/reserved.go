package ebpf

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/internal/tracked"
)

// The programs and connection tracking both hide clients behind ports of the node, and neither asks the other. If both
// give one port to connections with the same backend, the backend resets the first. So while connections of a former
// data plane go on, the plane in force leaves their ports alone:
//
//	programs with rows come ─► a table of nf_tables, before others' rules: whom they hide gets a port of another range
//	                        ─► taken: ports of connections that are tracked, until these have ended
//	                        ─► they are attached ─► the table goes
//	programs without rows   ─► the same table, until the last of their flows has ended
//
// Without that a connection may, rarely, be reset or have no answer, and nothing else is wrong. The plane logs a
// failure here, and goes on to serve.

// sharePorts comes before the programs are attached.
func (p *Plane) sharePorts() {
	switch {
	case p.draining || p.standing != nil:
		p.divert()
	case p.serve == TC && !p.packets.reserved.looked:
		if !p.hasPacketLinks() { // else only these programs hide clients
			p.divert()
		}
		p.lookReserved()
	}
}

// unsharePorts comes when they are.
func (p *Plane) unsharePorts() {
	if !p.draining && p.standing == nil {
		p.endDivert()
	}
}

// reservedPorts are those that the programs are to leave alone.
type reservedPorts struct {
	looked bool
	pacer  // to see which have ended
}

const (
	reservedPause    = 10 * time.Second // at first
	maxReservedPause = 30 * time.Minute
)

// auditReserved looks if it is time.
func (p *Plane) auditReserved() {
	if t := &p.packets.reserved; t.looked && t.due() {
		p.lookReserved()
	}
}

// lookReserved finds out which ports are taken.
func (p *Plane) lookReserved() {
	t := &p.packets.reserved
	var has map[packetsTuple]uint8
	err := p.devices.namespace.Do(func() (err error) {
		has, err = trackedPorts(p.packets.options.Ports)
		return err
	})
	if err == nil {
		err = reserve(p.packets.Maps[packetsMapTaken], has)
	}
	if err != nil {
		p.warn("source NAT may reuse ports of connections that another data plane opened, and reset them", err)
	}
	t.looked = true
	t.wait(reservedPause, maxReservedPause)
}

// reserve makes a map hold these ports, and no others.
func reserve(m *ebpf.Map, ports map[packetsTuple]uint8) error {
	fresh := maps.Clone(ports)
	err := each(m, func(key packetsTuple, _ uint8) error {
		if _, stays := ports[key]; !stays {
			return ignoreMissing(m.Delete(key))
		}
		delete(fresh, key)
		return nil
	})
	if err != nil {
		return err
	}
	return update(m, fresh)
}

// trackedPorts are those of a range that stand for clients of Services, by the packets that backends send to them.
func trackedPorts(ports portRange) (map[packetsTuple]uint8, error) {
	c, err := nfnetlink.Dial()
	if err != nil {
		return nil, err
	}
	defer c.Close()
	has := map[packetsTuple]uint8{}
	_, err = tracked.List(c, func(f *tracked.Flow) bool {
		if f.To != f.Answers && f.Back.Port()-ports.First < ports.Count {
			has[at(packetsHookINGRESS, uint8(f.Protocol), packetsEnd(f.Answers), packetsEnd(f.Back))] = 0
		}
		return false
	}, tracked.Filter{Status: tracked.NewFrom, Mask: tracked.NewFrom})
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EOPNOTSUPP) { // the kernel tracks no connections
		return nil, fmt.Errorf("list tracked connections: %w", err)
	}
	return has, nil
}

func packetsEnd(a netip.AddrPort) packetsEndpoint {
	return packetsEndpoint{Addr: packetsAddr(address(a.Addr())), Port: port(a.Port())}
}

// portsTable diverts clients that others hide from the programs' ports.
const portsTable = "fairlead-ebpf-ports"

// divert has others give clients that they hide ports that are not the programs'. Backends that reach themselves have
// no mark by which others hide them, so the table has the addresses of those that know a port of the programs.
func (p *Plane) divert() {
	backends := map[netip.Addr]bool{}
	err := p.eachTranslation(func(key packetsTuple, t packetsTranslation) error {
		if key.Hook == packetsHookINGRESS && t.State&packetsStateBACK != 0 {
			backends[objectsAddr(key.Src.Addr).addr()] = true
		}
		return nil
	})
	err = errors.Join(err, p.devices.namespace.Do(func() error { return divert(p.config.Mark, backends) }))
	if err != nil {
		p.warn("source NAT by the other data plane may reuse ports of open connections, and reset them", err)
	}
}

func (p *Plane) endDivert() {
	if err := p.devices.namespace.Do(dropPortsTable); err != nil {
		p.warn("the table "+portsTable+" cannot be removed: source NAT by the kernel keeps half of the ports unused", err)
	}
}

func (p *Plane) warn(message string, err error) {
	p.config.Logger().Warn(message, "error", err)
}

// divert makes or corrects the tables of the calling thread's network namespace. Another program may have deleted them,
// or another mark may be in use by now. A kernel without nf_tables has none.
func divert(mark uint32, backends map[netip.Addr]bool) error {
	mine, _, err := freePorts()
	if err != nil {
		return err
	}
	ports, ok := mine.others()
	if !ok {
		return dropPortsTable()
	}
	return withoutNFT(eachPortsTable(func(c *nfnetlink.Socket, t *nft.Table) error {
		t.Mark = cmp.Or(mark, dataplane.DefaultMark)
		chains := []nft.Chain{{
			Name:  "postrouting",
			Hook:  &nft.Hook{Kind: "nat", Number: unix.NF_INET_POST_ROUTING, Priority: nft.Masquerading - 1},
			Rules: t.MasqueradeTo(ports),
		}}
		if err := t.Load(c, chains); err != nil {
			return err
		}
		if t.Foreign { // another version's
			t.Delete()
			*t = newPortsTable(t.Family, t.Tx)
		}
		if t.Exists {
			if err := t.Find(c, 0); err != nil {
				return err
			}
		}
		if err := t.Structure(chains); err != nil {
			return err
		}
		for a := range backends {
			if t.Family.Mine(a) {
				t.Own(a, nft.Entry{Key: string(a.AsSlice()) + string(a.AsSlice())})
			}
		}
		t.Sweep()
		return nil
	}))
}

func dropPortsTable() error {
	return withoutNFT(eachPortsTable(func(c *nfnetlink.Socket, t *nft.Table) error {
		err := t.LoadTable(c)
		if err == nil && t.Exists {
			t.Delete()
		}
		return err
	}))
}

// withoutNFT forgives a kernel that has no nf_tables, and who was faster in deleting.
func withoutNFT(err error) error {
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// others are the ports that the programs do not use: those above theirs, or else those below, if they are enough.
func (r portRange) others() (nft.PortRange, bool) {
	below := nft.PortRange{First: 1024, Last: r.First - 1}
	above := nft.PortRange{First: r.First + r.Count, Last: 65535}
	switch {
	case int(r.First)+int(r.Count)+enoughPorts <= 65536:
		return above, true
	case r.First >= 1024+enoughPorts:
		return below, true
	}
	return nft.PortRange{}, false
}

func newPortsTable(f nft.Family, tx *nft.Transaction) nft.Table {
	return nft.NewTable(nft.Table{Family: f, Name: portsTable, Tx: tx, Sets: []*nft.Set{f.Hairpins()}})
}

// eachPortsTable changes the table of each family.
func eachPortsTable(plan func(*nfnetlink.Socket, *nft.Table) error) error {
	c, err := nfnetlink.Dial()
	if err != nil {
		return err
	}
	defer c.Close()
	tx := &nft.Transaction{}
	for _, f := range nft.Families {
		t := newPortsTable(f, tx)
		if err := plan(c, &t); err != nil {
			return fmt.Errorf("%s: %w", &t, err)
		}
	}
	return tx.Commit(c, func(steps []nft.Step) error { return tx.Send(c, steps) })
}
