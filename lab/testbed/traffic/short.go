package traffic

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// connect makes a short connection.
func (l *Watch) connect(w *client) {
	start := time.Now()
	o, err := l.bed.Probe(context.WithoutCancel(l.ctx), testbed.Probe{
		From: w.From, To: w.To, Protocol: w.Protocol, Timeout: l.spec.Timeout,
	})
	switch {
	case err == nil && o.Result == testbed.Refused:
		err = errRefused
	case err == nil && o.Result != testbed.Answered:
		err = errors.New(o.Result.String())
	}
	if err != nil {
		fault := l.failed(w, err, time.Since(start))
		l.look(fault, o.Port)
		return
	}
	l.answered(w, o.Backend, o.RTT)
}

// look notes what the kernel of the node has of a client's port, for the faults that are told. It takes time, and comes
// after the fault has been noted.
func (l *Watch) look(fault int, port uint16) {
	l.mu.Lock()
	told := l.counts[l.faults[fault].Kind].bad() <= mostTold
	l.mu.Unlock()
	if !told {
		return
	}
	kernel := l.bed.OfPort(port)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.faults[fault].Kernel = kernel
}

// ask sends a datagram by a socket of its own, which is connected, as those of resolvers are.
func (l *Watch) ask(w *client) {
	c, err := l.socket(w.Path, true)
	if err != nil {
		l.failed(w, err, 0)
		return
	}
	defer c.Close()
	l.exchange(w, c, 1)
}

// converse has a socket of UDP ask again and again. One that is told that it is over is followed by another.
func (l *Watch) converse(w *client, connected bool) {
	l.group.Go(func() {
		defer l.retire(w)
		pace := time.NewTicker(l.spec.Pause)
		defer pace.Stop()
		var c *socket
		for n := 1; l.ctx.Err() == nil; n++ {
			l.begin(w)
			var err error
			if c == nil {
				if c, err = l.socket(w.Path, connected); err != nil {
					l.failed(w, err, 0)
				}
			}
			if c != nil && !l.exchange(w, c, n) {
				_ = c.Close()
				c = nil
			}
			select {
			case <-l.ctx.Done():
			case <-pace.C:
			}
		}
		if c != nil {
			_ = c.Close()
		}
	})
}

// socket is one of UDP.
type socket struct {
	*net.UDPConn
	to        netip.AddrPort
	connected bool
}

func (l *Watch) socket(p Path, connected bool) (*socket, error) {
	if connected {
		c, err := l.bed.Dial(context.WithoutCancel(l.ctx), p.From, model.UDP, p.To)
		if err != nil {
			return nil, err
		}
		return &socket{c.(*net.UDPConn), p.To, true}, nil
	}
	network := "udp4"
	if p.To.Addr().Is6() {
		network = "udp6"
	}
	var c *net.UDPConn
	err := l.bed.Do(p.From, func() (err error) {
		c, err = net.ListenUDP(network, nil)
		return err
	})
	return &socket{c, p.To, false}, err
}

// again is how long a datagram is waited for before it is sent again.
const again = time.Second

// exchange asks, and waits for the answer to this question. It reports whether there was one.
func (l *Watch) exchange(w *client, c *socket, number int) bool {
	start := time.Now()
	for {
		backend, err := c.exchange(strconv.Itoa(number))
		waited := time.Since(start)
		switch {
		case err == nil:
			l.answered(w, backend, waited)
			return true
		case !errors.Is(err, os.ErrDeadlineExceeded):
		case waited < l.spec.Timeout:
			l.resent(w)
			continue
		default:
			err = fmt.Errorf("no answer, though it was sent again each second")
		}
		l.failed(w, err, waited)
		return false
	}
}

// exchange returns the pod that answered. Answers of other servers are not for this client; for a connected socket the
// kernel drops them.
func (c *socket) exchange(number string) (backend string, err error) {
	question := []byte(string(testbed.Echo) + number)
	if c.connected {
		_, err = c.Write(question)
	} else {
		_, err = c.WriteToUDPAddrPort(question, c.to)
	}
	if err == nil {
		err = c.SetReadDeadline(time.Now().Add(again))
	}
	answer := make([]byte, 2048)
	for err == nil {
		n, from, failed := c.ReadFromUDPAddrPort(answer)
		who, what, _ := strings.Cut(string(answer[:n]), " ")
		switch {
		case failed != nil:
			err = failed
		case (c.connected || from == c.to) && what == number:
			return who, nil
		}
	}
	return "", err
}
