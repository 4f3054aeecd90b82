package kubernetes

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"sync"
	"time"

	"fairlead.dev/fairlead/lab/testbed"
)

// Relay is the API server's address in a Bed: 192.0.2.254:6443 and its IPv6 twin, on the LAN's gateway.
// It passes bytes on and can fail as networks do. Its methods may be called concurrently.
type Relay struct {
	plane *ControlPlane
	bed   *testbed.Bed

	mu        sync.Mutex
	listeners []net.Listener
	conns     map[net.Conn]struct{}
	delay     time.Duration
	passing   chan struct{} // closed while bytes pass
	busy      time.Time     // see Busy
	closed    bool
	group     sync.WaitGroup
}

// relayAddr is where a Relay listens.
func relayAddr(v6 bool) netip.AddrPort {
	a := netip.AddrFrom4([4]byte{192, 0, 2, 254})
	if v6 {
		a = testbed.EmbedV6(a)
	}
	return netip.AddrPortFrom(a, 6443)
}

// Serve makes the API server reachable in a Bed, from every node, pod and client.
func (c *ControlPlane) Serve(bed *testbed.Bed) (*Relay, error) {
	r := &Relay{plane: c, bed: bed, conns: map[net.Conn]struct{}{}, passing: make(chan struct{})}
	close(r.passing)
	if err := r.Restore(); err != nil {
		return nil, fmt.Errorf("serve the API in a testbed: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.relays = append(c.relays, r)
	return r, nil
}

// Busy is when much at once was last passed on: lists are, and single changes are not.
func (r *Relay) Busy() time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.busy
}

// Addr is the API server's address in the Bed.
func (r *Relay) Addr(v6 bool) netip.AddrPort { return relayAddr(v6) }

// Kubeconfig writes a kubeconfig for programs in the Bed into dir and returns its name.
func (r *Relay) Kubeconfig(dir string, u User) (string, error) {
	path := filepath.Join(dir, kubeconfigName(u))
	return path, r.plane.writeKubeconfig(path, "https://"+r.Addr(false).String(), u)
}

// Cut resets all connections and refuses new ones, until Restore.
func (r *Relay) Cut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stopListening()
	r.reset()
}

// Reset resets all connections; new ones are welcome.
func (r *Relay) Reset() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.reset()
}

// Hang keeps all connections open, accepts new ones, and passes nothing on until Restore: what a client
// sees of an API server whose machine has lost its network.
func (r *Relay) Hang() {
	r.mu.Lock()
	defer r.mu.Unlock()
	select {
	case <-r.passing:
		r.passing = make(chan struct{})
	default: // it hangs already
	}
}

// Slow delays whatever passes; 0 ends it.
func (r *Relay) Slow(d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.delay = d
}

// Restore ends Cut and Hang.
func (r *Relay) Restore() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return net.ErrClosed
	}
	r.pass()
	if len(r.listeners) > 0 {
		return nil
	}
	return r.bed.Do(testbed.LAN, func() error {
		for _, v6 := range []bool{false, true} {
			l, err := net.Listen("tcp", relayAddr(v6).String())
			if err != nil {
				return err
			}
			r.listeners = append(r.listeners, l)
			r.group.Go(func() { r.acceptLoop(l) })
		}
		return nil
	})
}

// Close ends the relay. The ControlPlane does so as well.
func (r *Relay) Close() {
	r.mu.Lock()
	r.closed = true
	r.stopListening()
	r.reset()
	r.pass()
	r.mu.Unlock()
	r.group.Wait()
}

func (r *Relay) pass() {
	select {
	case <-r.passing:
	default:
		close(r.passing)
	}
}

func (r *Relay) stopListening() {
	for _, l := range r.listeners {
		l.Close()
	}
	r.listeners = nil
}

func (r *Relay) reset() {
	for c := range r.conns {
		c.Close()
	}
	clear(r.conns)
}

func (r *Relay) acceptLoop(l net.Listener) {
	for {
		c, err := l.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err == nil && r.add(c):
			r.group.Go(func() { r.relay(c) })
		}
	}
}

// add notes a connection so that it can be reset; after Cut it is reset at once.
func (r *Relay) add(c net.Conn) bool {
	_ = c.(*net.TCPConn).SetLinger(0) // closing is resetting
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.listeners) == 0 {
		c.Close()
		return false
	}
	r.conns[c] = struct{}{}
	return true
}

func (r *Relay) relay(client net.Conn) {
	defer r.drop(client)
	server, err := net.Dial("tcp", r.plane.hostAddr().String())
	if err != nil || !r.add(server) {
		return
	}
	defer r.drop(server)
	r.group.Go(func() {
		defer r.drop(client)
		defer r.drop(server)
		r.copy(client, server)
	})
	r.copy(server, client)
}

func (r *Relay) drop(c net.Conn) {
	c.Close()
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.conns, c)
}

// copy passes bytes on as the present state of the network has it.
func (r *Relay) copy(to, from net.Conn) {
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		if err != nil {
			return
		}
		r.mu.Lock()
		passing, delay := r.passing, r.delay
		if n > len(buffer)/4 {
			r.busy = time.Now()
		}
		r.mu.Unlock()
		time.Sleep(delay)
		<-passing
		if _, err := to.Write(buffer[:n]); err != nil {
			return
		}
	}
}
