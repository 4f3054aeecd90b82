package relay

import (
	"errors"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/socket"
	"fairlead.dev/fairlead/internal/share"
	"fairlead.dev/fairlead/model"
)

// UDP has no connections. A flow is what one client says to one destination:
//
//	datagram ─► begin: a place, a backend, a socket ─► asked ─ an answer ─► answered ─ the client goes on ─► proven
//	                      ▲                              │ ICMP: no listener                                   │
//	                      └── elsewhere: another backend ┘            silence, or the row or the backend goes ─┴─► end
//
// Until there is an answer, the last datagram is kept for another backend, unless it is large. Flows whose clients have
// not gone on after an answer count as those of one client, because a sender may forge as many addresses as it likes.
//
// Two locks are taken in one order: that of all flows, then that of one.

// flows are those of UDP that are open.
type flows struct {
	places *share.Pool // of which each has one

	mu     sync.Mutex
	fronts map[netip.AddrPort]*front
	byPool map[*pool]map[*flow]struct{}
	// redirected are those of clients that were redirected, by where these were going.
	redirected map[netip.AddrPort]map[*flow]struct{}
	over       bool        // the proxy has ended
	hurried    atomic.Bool // see Hurry
}

// front is the socket from which the answers of one destination come. It has the destination's address and port, and
// receives nothing: the kernel's rules lead datagrams for that destination to the socket that tells the origin.
// Redirected datagrams are answered from the socket to which they came, whatever their destination: the kernel
// translates back.
type front struct {
	*net.UDPConn
	at    netip.AddrPort
	back  func()                   // gives back the file that it has borrowed; nil: it is not ours to close
	flows map[netip.AddrPort]*flow // by client
}

// flow is one client's way to a backend.
type flow struct {
	socket.Activity // when the client or the backend has last sent
	Call
	proxy   *Proxy
	place   share.Place
	front   *front
	began   time.Time
	asked   time.Time // the backend
	checked time.Time // of one that was redirected: when its destination was last sure

	mu        sync.Mutex
	conn      *Socket // nil: it is not open yet
	backend   netip.AddrPort
	carried   *socket.Carried
	tried     []netip.AddrPort
	pending   []byte // the latest datagram, unless it is large, until the backend has answered
	questions int    // datagrams of the client
	told      bool   // that the backend does not answer
	moving    bool   // to another backend
	answered  bool
	proven    bool // the client has gone on after that
	over      bool
}

// maxPending holds what begins a flow as a rule: a question, or a packet that no router parts. As many as there may be
// flows may have no answer.
const maxPending = 1 << 11

func newFlows(most int) *flows {
	return &flows{
		places: share.NewReplacing(most),
		fronts: map[netip.AddrPort]*front{}, byPool: map[*pool]map[*flow]struct{}{},
		redirected: map[netip.AddrPort]map[*flow]struct{}{},
	}
}

// datagram sends one on, over the client's flow or a new one.
func (p *Proxy) datagram(at Packet, data []byte) {
	for range 2 { // the flow that is found may have ended, or its backend is not there any more
		f := p.flows.find(at)
		if f != nil && at.translated() && f.key.AddrPort() != at.Destination { // the port is another client's by now
			p.flows.end(f)
			f = nil
		}
		if f == nil {
			f = p.begin(at)
		}
		if f == nil {
			return
		}
		if err := f.send(data); err == nil || p.elsewhere(f, err) {
			return
		}
		p.flows.end(f)
	}
}

// sure reports whether the client, which was redirected, is still asking for the flow's destination, as it said
// something a moment ago. While connection tracking knows the flow, it gives the client's address and port to no other;
// it forgets what is silent.
func (f *flow) sure() bool {
	const moment = 5 * time.Second
	f.mu.Lock()
	defer f.mu.Unlock()
	now := time.Now()
	ok := now.Sub(f.checked) < moment
	if ok {
		f.checked = now
	}
	return ok
}

// assure notes that connection tracking says so.
func (f *flow) assure() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.checked = time.Now()
}

func (l *flows) find(at Packet) *flow {
	l.mu.Lock()
	defer l.mu.Unlock()
	if front := l.fronts[at.answeredFrom()]; front != nil {
		return front.flows[at.Client]
	}
	return nil
}

// translated reports whether connection tracking knows where it was going.
func (at Packet) translated() bool { return at.From != nil && at.From.Redirected }

// answeredFrom is the address of the socket from which answers go.
func (at Packet) answeredFrom() netip.AddrPort {
	if at.From != nil {
		return at.From.At
	}
	return at.Destination
}

// send sends a datagram to the backend, and keeps it until the backend answers. A client that sends again after an
// answer has proven that its address is not forged.
func (f *flow) send(data []byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.over {
		return net.ErrClosed
	}
	if !f.answered {
		if f.pending = f.pending[:0]; len(data) <= maxPending {
			f.pending = append(f.pending, data...)
		}
	} else if !f.proven {
		f.proven = true
		f.proxy.flows.places.Prove(&f.place)
	}
	f.questions++
	f.Touch()
	if f.moving {
		return nil // it is sent when the flow has moved
	}
	if !f.answered && !f.told && time.Unix(0, f.Used()).Sub(f.asked) >= silence {
		f.proxy.tell(&f.Call, f.backend, os.ErrDeadlineExceeded)
		f.told = true
	}
	_ = f.conn.SetReadDeadline(f.deadline()) // fails only if the flow is over, and so does Write
	f.carried.ToBackend.Add(1, len(data))
	return f.conn.Send(data)
}

// deadline is when the flow ends if it is silent. As connection tracking has it, one that goes on has more patience.
func (f *flow) deadline() time.Time {
	o := f.proxy.options
	timeout := o.FlowTimeout
	switch {
	case f.goesOn():
		timeout = o.StreamTimeout
	case f.proxy.flows.hurried.Load() && f.settled():
		timeout = settledTimeout
	}
	return time.Unix(0, f.Used()).Add(timeout)
}

const settledTimeout = time.Second

// settled reports whether the client has asked once, and has its answer, and the flow's socket has its address.
func (f *flow) settled() bool {
	return f.questions == 1 && f.answered && f.conn.LocalAddr().Addr() == f.client.Addr()
}

// Hurry has flows that are settled end soon, while another plane is in force. A flow's socket has a port of its
// client's address. If the client sends from that port through the other plane, the answer would end at this socket:
// the kernel looks for a socket before it forwards (udp_v4_early_demux).
func (p *Proxy) Hurry(on bool) {
	l := p.flows
	if l.hurried.Swap(on) == on {
		return
	}
	for _, f := range l.touched(nil, nil) {
		f.mu.Lock()
		_ = f.conn.SetReadDeadline(f.deadline()) // fails only if the flow is over
		f.mu.Unlock()
	}
}

// expired reports whether the flow has been silent for too long.
func (f *flow) expired() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return !time.Now().Before(f.deadline())
}

// goesOn reports whether the flow is more than a question and its answers.
func (f *flow) goesOn() bool {
	const young = 2 * time.Second
	return f.answered && time.Unix(0, f.Used()).Sub(f.began) > young
}

// begin opens a flow and starts to send its answers; nil if there is no backend.
func (p *Proxy) begin(at Packet) *flow {
	d, ok := p.Rows.lookup(at)
	if !ok {
		return nil
	}
	now := time.Now()
	f := &flow{Call: Call{decision: d, client: at.Client}, proxy: p, began: now, asked: now, checked: now}
	f.Touch()
	owner := d.owner(at)
	owner.Unproven = true
	if !p.flows.places.Enter(&f.place, owner, 1, f) {
		p.turned.count(&d, tooManyFlows)
		return nil
	}
	if err := p.connectFlow(f, at); err != nil {
		p.flows.end(f)
		return nil
	}
	d.pool.attempted(at.Client.Addr(), f.backend, now)
	p.group.Go(func() { p.answers(f) })
	p.expel(f) // Expel has not seen it if the rows have changed since lookup
	return f
}

// connectFlow connects a flow with a backend.
func (p *Proxy) connectFlow(f *flow, at Packet) error {
	conn, backend, err := p.connectAny(f.Call, nil)
	if err != nil {
		p.undialed(&f.decision, err)
		return err
	}
	f.mu.Lock()
	f.conn, f.backend, f.carried = conn, backend, f.pool.carriedBy(backend)
	if !f.over {
		f.carried.Open.Add(1)
	}
	f.mu.Unlock()
	err = p.add(f, at)
	switch {
	case isExhausted(err):
		p.turned.count(&f.decision, tooManyFiles)
	case errors.Is(err, unix.EADDRINUSE):
		e := EndpointOf(f.key)
		if _, told := p.told.LoadOrStore(e, true); !told {
			p.options.Unserved(e, err)
		}
	}
	return err
}

// connectAny opens a socket to one of the backends that were not tried.
func (p *Proxy) connectAny(c Call, tried []netip.AddrPort) (conn *Socket, at netip.AddrPort, err error) {
	at, err = p.reach(c, tried, func(b model.Backend, _ time.Duration) (err error) {
		conn, err = p.ask(c, b)
		return err
	})
	if err == nil && conn.Leave != nil {
		p.leaveFirst(conn)
	}
	return conn, at, err
}

// Yield implements share.Holder.
func (f *flow) Yield() {
	if f.proxy.context.Err() == nil {
		f.proxy.turned.yielded(f.service(), tooManyFlows)
	}
	f.proxy.flows.end(f)
}

// add enters a flow. If it is the first one of its destination, it opens the socket for the answers.
func (p *Proxy) add(f *flow, at Packet) error {
	l := p.flows
	l.mu.Lock()
	defer l.mu.Unlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	if l.over || f.over {
		return net.ErrClosed
	}
	from := at.answeredFrom()
	if l.fronts[from] == nil {
		front, err := p.openFront(at, share.Of(f.service(), share.Client{}))
		if err != nil {
			return err
		}
		l.fronts[from] = front
	}
	f.front = l.fronts[from]
	f.front.flows[f.client] = f
	enter(l.byPool, f.pool, f)
	if at.translated() {
		enter(l.redirected, f.key.AddrPort(), f)
	}
	return nil
}

func enter[K comparable](index map[K]map[*flow]struct{}, key K, f *flow) {
	if index[key] == nil {
		index[key] = map[*flow]struct{}{}
	}
	index[key][f] = struct{}{}
}

func leave[K comparable](index map[K]map[*flow]struct{}, key K, f *flow) {
	delete(index[key], f)
	if len(index[key]) == 0 {
		delete(index, key)
	}
}

func (p *Proxy) openFront(at Packet, o share.Owner) (*front, error) {
	f := &front{at: at.answeredFrom(), flows: map[netip.AddrPort]*flow{}}
	if at.From != nil {
		f.UDPConn = at.From.UDPConn
		return f, nil
	}
	if f.back = p.borrow(o, 1); f.back == nil {
		return nil, unix.EMFILE
	}
	err := p.sockets.Do(func() (err error) {
		f.UDPConn, err = socket.ListenUDP(f.at, socket.Transparent, socket.Shared)
		return err
	})
	if err != nil {
		f.back()
	}
	return f, err
}

// answers sends the backend's answers to the client until the flow ends.
func (p *Proxy) answers(f *flow) {
	for {
		conn := f.current()
		err := p.answer(f, conn)
		if err == nil || conn != f.current() || errors.Is(err, unix.EMSGSIZE) { // EMSGSIZE: see Send
			continue
		}
		if errors.Is(err, unix.ECONNREFUSED) && p.elsewhere(f, err) {
			continue
		}
		if errors.Is(err, os.ErrDeadlineExceeded) && !f.expired() { // the client has said something meanwhile
			continue
		}
		p.flows.end(f)
		return
	}
}

func (f *flow) current() *Socket {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.conn
}

// answer waits for a datagram of the backend and sends it to the client. It takes a buffer only when there is something
// to read: most flows are short, and idle for the rest of their time. While it reads it takes no lock: closing the
// socket holds the flow's lock, and waits until the read is over.
func (p *Proxy) answer(f *flow, conn *Socket) error {
	var buf *[bufferSize]byte
	var n int
	var failed error
	err := conn.Raw().Read(func(fd uintptr) bool {
		buf = p.buffers.Get().(*[bufferSize]byte)
		if n, failed = unix.Read(int(fd), buf[:]); failed != nil {
			p.buffers.Put(buf)
		}
		return !errors.Is(failed, unix.EAGAIN)
	})
	if err = errors.Join(err, failed); err != nil {
		return err
	}
	defer p.buffers.Put(buf)
	f.noteAnswer(n)
	_, _ = f.front.WriteToUDPAddrPort(buf[:n], f.client) // a datagram that the kernel refuses is lost
	return nil
}

// noteAnswer notes that the backend has answered, so many bytes.
func (f *flow) noteAnswer(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.Touch()
	f.carried.ToClient.Add(1, n)
	if !f.answered {
		f.proxy.tell(&f.Call, f.backend, nil)
		f.pool.confirmed(f.client.Addr(), f.backend, time.Now())
	}
	f.answered, f.pending = true, nil
	_ = f.conn.SetReadDeadline(f.deadline()) // fails only if the flow is over
}

// elsewhere moves a flow whose backend is not there to another one, with what the client has said last, and reports
// whether that was possible. A backend that has answered before keeps the flow: it may be back in a moment.
func (p *Proxy) elsewhere(f *flow, why error) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.over && !f.answered && !f.moving && !f.told {
		p.tell(&f.Call, f.backend, why)
	}
	if f.over || f.answered || f.moving || len(f.tried)+1 >= p.options.Dials {
		return f.moving
	}
	f.pool.missed(f.client.Addr(), f.backend)
	f.pool.failed(f.backend, time.Now())
	f.tried = append(f.tried, f.backend)
	f.moving = true
	f.mu.Unlock() // senders of datagrams do not wait
	conn, backend, err := p.connectAny(f.Call, slices.Clone(f.tried))
	f.mu.Lock()
	f.moving = false
	over := f.over || !f.pool.keeps(backend) // Expel has seen the one before
	if err == nil && over {
		conn.end()
	}
	if err != nil || over {
		return false
	}
	f.conn.end()
	f.conn, f.backend, f.asked, f.told = conn, backend, time.Now(), false
	f.carried.Open.Add(-1)
	f.carried = f.pool.carriedBy(backend)
	f.carried.Open.Add(1)
	f.Touch()
	f.pool.attempted(f.client.Addr(), backend, time.Now())
	_ = f.conn.SetReadDeadline(f.deadline())
	if len(f.pending) == 0 {
		return true
	}
	f.carried.ToBackend.Add(1, len(f.pending))
	return f.conn.Send(f.pending) == nil
}

// end forgets a flow.
func (l *flows) end(f *flow) {
	l.places.Leave(&f.place)
	f.mu.Lock()
	if !f.over && f.carried != nil {
		f.carried.Open.Add(-1)
	}
	if f.over = true; f.conn != nil {
		f.conn.end()
	}
	f.mu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	leave(l.byPool, f.pool, f)
	leave(l.redirected, f.key.AddrPort(), f)
	if f.front == nil || f.front.flows[f.client] != f {
		return
	}
	delete(f.front.flows, f.client)
	if len(f.front.flows) == 0 {
		delete(l.fronts, f.front.at)
		if f.front.back != nil {
			f.front.Close()
			f.front.back()
		}
	}
}

// endAll ends all flows, for good.
func (l *flows) endAll() {
	l.mu.Lock()
	l.over = true
	all := l.all()
	l.mu.Unlock()
	for _, f := range all {
		l.end(f)
	}
}

func (l *flows) all() (all []*flow) {
	for _, front := range l.fronts {
		for _, f := range front.flows {
			all = append(all, f)
		}
	}
	return all
}

// touched are the flows of pools and destinations that have changed; of a nil change all.
func (l *flows) touched(c *model.Change, rows *Directory) (some []*flow) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c == nil {
		return l.all()
	}
	of := func(key model.Key) {
		if key.Protocol != model.UDP {
			return
		}
		some = slices.AppendSeq(some, maps.Keys(l.redirected[key.AddrPort()]))
		if front := l.fronts[key.AddrPort()]; front != nil {
			for _, f := range front.flows {
				some = append(some, f)
			}
		}
	}
	for key := range c.Frontends.Set.All() {
		of(key)
	}
	for _, key := range c.Frontends.Delete {
		of(key)
	}
	for id := range c.Pools.Set.All() {
		for f := range l.byPool[rows.pool(id)] {
			some = append(some, f)
		}
	}
	return some
}

// Expel ends the flows that the rows do not allow any more: their client's next datagram begins another one.
func (p *Proxy) Expel(c *model.Change) {
	p.turned.forget(p.Rows)
	for _, f := range p.flows.touched(c, p.Rows) {
		p.expel(f)
	}
}

func (p *Proxy) expel(f *flow) {
	f.mu.Lock()
	backend := f.backend
	f.mu.Unlock()
	if !p.Rows.leads(f.key, f.pool) || !f.pool.keeps(backend) {
		p.flows.end(f)
	}
}
