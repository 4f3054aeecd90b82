package conntrack

import (
	"context"
	"encoding/binary"
	"errors"
	"maps"
	"net/netip"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/socket"
	"fairlead.dev/fairlead/internal/namespace"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/internal/tracked"
	"fairlead.dev/fairlead/model"
)

// idle closes connections over which nothing passes. Connection tracking knows for how long, as each packet renews the
// time for which it remembers them. It does not tell the numbers that a reset must have, but the client does:
//
//	CloseIdle ─► a goroutine lists flows ─► Choose ─► set "asked"; an ACK with a false number, as if by the Service
//	             client: ACK with the true numbers (RFC 9293, 3.10.7.4) ─► set "heard"
//	             goroutine ─► a reset to the client ─► not in set "used"? ─► one to the backend; forgotten
//	             anything else that passes ─► set "used": the reset to the client is dropped
//
// The kernel decides that about each reset itself: many clients ask something just when they have been idle for long. A
// number that has become false does no harm. The tables are there during a round.
type idle struct {
	aside
	conntrack *nfnetlink.Socket
	network   namespace.Namespace
	relayed   uint32               // the mark of flows that are the process's own
	mark      uint32               // of packets that connection tracking is not to see
	deaf      map[orphan]time.Time // clients that have not answered, and until when they are left alone
}

const (
	closeMost = 256 // in a round
	idleRest  = 10
	// Answers are looked for often, until all have come, or clients had time enough.
	heardInterval, heardPatience = 10 * time.Millisecond, 300 * time.Millisecond
	deafFor                      = time.Minute

	askedSet, heardSet, usedSet = "asked", "heard", "used" // by client and Service
)

// CloseIdle implements dataplane.Observed.
func (p *plane) CloseIdle(ctx context.Context, of *dataplane.Idle) (int, error) {
	n, err := p.Dataplane.CloseIdle(ctx, of)
	i := &p.idle
	closed, failed := i.begin(func() (closed int, err error) {
		err = i.network.Do(func() (err error) {
			closed, err = i.close(of)
			return err
		})
		return closed, err
	})
	return n + closed, errors.Join(err, failed)
}

func (i *idle) close(of *dataplane.Idle) (closed int, err error) {
	if i.conntrack, err = nfnetlink.Dial(); err != nil {
		return 0, err
	}
	defer i.conntrack.Close()
	begun := time.Now()
	flows, open, err := i.list(of.Backends)
	if i.next = time.Now().Add(idleRest * time.Since(begun)); err != nil {
		return 0, err
	}
	asked, all := map[string]*tracked.Flow{}, []orphan{}
	for _, at := range of.Choose(open) {
		if f := &flows[at]; len(all) < closeMost {
			who := orphan{f.From, f.To}
			asked[string(who.key())], all = f, append(all, who)
		}
	}
	if len(all) == 0 {
		return 0, nil
	}
	ruleset, tables, err := nft.Owner{Network: i.network, Changed: i.changed}.Open("fairlead-idle", idleSets, i.chains)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, ruleset.Close()) }()
	err = addFlows(ruleset, tables, all, deafFor)
	for who, f := range asked {
		now, gone := tracked.BySender(i.conntrack, tracked.Tuple{Protocol: model.TCP, From: f.From, To: f.To})
		if gone != nil || now.Left > f.Left { // a packet has come before the set was there
			delete(asked, who)
			continue
		}
		err = errors.Join(err, i.send(f.To, f.From, 0, false))
	}
	for begun = time.Now(); len(asked) > 0 && time.Since(begun) < heardPatience; time.Sleep(heardInterval) {
		for _, t := range tables {
			n, failed := i.hear(ruleset, t, asked)
			closed, err = closed+n, errors.Join(err, failed)
		}
	}
	for _, f := range asked {
		i.deaf[orphan{f.From, f.To}] = time.Now().Add(deafFor)
	}
	return closed, err
}

// list lists the connections to backends.
func (i *idle) list(of map[netip.AddrPort]bool) (flows []tracked.Flow, open []dataplane.Open, err error) {
	now := time.Now()
	maps.DeleteFunc(i.deaf, func(_ orphan, until time.Time) bool { return now.After(until) })
	least, established, err := renewed(i.network)
	if err != nil {
		return nil, nil, err
	}
	flows, err = tracked.List(i.conntrack, func(f *tracked.Flow) bool {
		return of[f.Answers] && f.To != f.Answers && f.Mark&i.relayed == 0 && f.Established()
	}, flowsTo(maps.Keys(of))...)
	for _, f := range flows {
		o := dataplane.Open{Service: f.To, Backend: f.Answers}
		acknowledged := !f.Unheard && (f.Left > least || least == established)
		if acknowledged && i.deaf[orphan{f.From, f.To}].IsZero() {
			o.Idle = max(0, established-f.Left-time.Second) // which the kernel rounds
		}
		open = append(open, o)
	}
	return flows, open, err
}

// hear closes the connections whose clients have answered.
func (i *idle) hear(r *nft.Ruleset, t *nft.Table, asked map[string]*tracked.Flow) (closed int, err error) {
	numbers, used := map[string]string{}, map[string]bool{}
	err = t.Members(r.Socket, 1, func() { clear(numbers) }, func(key string, _ nft.Element) {
		n := len(key) - 8
		numbers[key[:n]] = key[n:]
	})
	maps.DeleteFunc(numbers, func(who, _ string) bool { return asked[who] == nil })
	for who, n := range numbers {
		err = errors.Join(err, i.send(asked[who].To, asked[who].From, binary.BigEndian.Uint32([]byte(n[4:])), true))
	}
	if len(numbers) > 0 {
		failed := t.Members(r.Socket, 2, func() {}, func(key string, _ nft.Element) { used[key] = true })
		if failed != nil { // any of them may be in use
			return 0, errors.Join(err, failed)
		}
	}
	for who, n := range numbers {
		f := asked[who]
		if delete(asked, who); !used[who] {
			err = errors.Join(err, i.send(f.Back, f.Answers, binary.BigEndian.Uint32([]byte(n)), true),
				tracked.Forget(i.conntrack, []tracked.Flow{*f}))
			closed++
		}
	}
	return closed, err
}

// send sends a reset with a number, as if from an address, or an ACK that has a false one. The kernel makes it, for a
// socket that has not connected, but is put into that state (TCP_REPAIR).
func (i *idle) send(from, to netip.AddrPort, number uint32, reset bool) error {
	const repair, repairAndProbe, off, sendQueue = 1, 0, -1, 2 // of linux/tcp.h
	set := func(fd int, options ...[3]int) (err error) {
		for _, o := range options {
			err = errors.Join(err, unix.SetsockoptInt(fd, o[0], o[1], o[2]))
		}
		return err
	}
	c, err := socket.New(unix.IPPROTO_TCP, from.Addr().Is6(), func(fd int, _ bool) error {
		return set(fd, [3]int{unix.SOL_IP, unix.IP_TRANSPARENT, 1}, [3]int{unix.SOL_SOCKET, unix.SO_MARK, int(i.mark)},
			[3]int{unix.SOL_TCP, unix.TCP_REPAIR, repair}, [3]int{unix.SOL_TCP, unix.TCP_REPAIR_QUEUE, sendQueue},
			[3]int{unix.SOL_TCP, unix.TCP_QUEUE_SEQ, int(number)})
	}, socket.Bind(from))
	if err != nil {
		return err
	}
	defer c.Close() // silently
	if err := c.Connect(to); err != nil || !reset {
		return errors.Join(err, c.Do(func(fd int) error {
			return set(fd, [3]int{unix.SOL_TCP, unix.TCP_REPAIR, repairAndProbe}, [3]int{unix.SOL_TCP, unix.TCP_REPAIR, repair})
		}))
	}
	defer c.Reset()
	return c.Do(func(fd int) error { return set(fd, [3]int{unix.SOL_TCP, unix.TCP_REPAIR, off}) })
}

func idleSets(f nft.Family) []*nft.Set {
	const byPackets = unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL
	return []*nft.Set{
		{Name: askedSet, Flags: unix.NFT_SET_TIMEOUT, Key: flowKey(f)},
		{Name: heardSet, Flags: byPackets, Key: append(flowKey(f), nft.Index, nft.Index)},
		{Name: usedSet, Flags: byPackets, Key: flowKey(f)},
	}
}

// chains hear what passes of connections that were asked.
func (i *idle) chains(f nft.Family) []nft.Chain {
	const flags, onlyACK, numbers = 0x3f, 0x10, 4 // of TCP, and where these are
	n := f.Address.Words()
	transport := func(from, length, at uint32) any {
		return &expr.Payload{
			Base: expr.PayloadBaseTransportHeader, Offset: from, Len: length, DestRegister: nft.Word(at),
		}
	}
	note := func(set string) any {
		return &expr.Dynset{SrcRegKey: nft.Word(0), SetName: set, Operation: unix.NFT_DYNSET_OP_ADD, Timeout: deafFor}
	}
	rules := []nft.Rule{
		nft.NewRule("no data", nft.TCPFlags(flags, nft.Equals([]byte{onlyACK})), fromClient(),
			inSet(f, askedSet, true), transport(numbers, 8, 2*n+2), note(heardSet), nft.Accept()),
		nft.NewRule("all else", inSet(f, askedSet, true), note(usedSet)),
	}
	ours := []any{nft.LoadMeta(expr.MetaKeyMARK, 0), nft.Bits(0, i.mark, 0), nft.Equals(nft.Native(i.mark))}
	return []nft.Chain{
		nft.FilterChain("ours", unix.NF_INET_LOCAL_OUT, -300, // before connection tracking
			nft.NewRule("not to a client that is active", ours, nft.IsProtocol(unix.IPPROTO_TCP), f.Load(f.Destination, 0),
				nft.LoadPort(n), f.Load(f.Source, n+1), transport(0, 2, 2*n+1), nft.In(usedSet), nft.Drop()),
			nft.NewRule("untracked", ours, &expr.Notrack{})),
		nft.FilterChain("prerouting", unix.NF_INET_PRE_ROUTING, 0, rules...),
		nft.FilterChain("output", unix.NF_INET_LOCAL_OUT, 0, rules...),
	}
}
