package traffic

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// streams carries bulk data on as many connections as are wanted.
func (l Load) streams(ctx context.Context, c *collector) {
	var group sync.WaitGroup
	targets, sources := l.targets(), &sources{ports: l.Sources}
	for i := range l.Concurrency {
		group.Go(func() {
			begin := time.Now()
			s, err := l.stream(ctx, targets[i%len(targets)].name, sources, c)
			s.total = time.Since(begin)
			c.add(s, err)
		})
	}
	group.Wait()
}

// stream carries data until Duration is over, or ctx.
func (l Load) stream(ctx context.Context, to string, from *sources, c *collector) (s sample, err error) {
	begin := time.Now()
	conn, err := dial(&net.Dialer{Timeout: l.Timeout, Control: reuse}, to, from)
	if err != nil {
		return s, err
	}
	defer conn.Close()
	s.connected, s.connect = true, time.Since(begin)
	if l.Duration > 0 {
		_ = conn.SetDeadline(begin.Add(l.Duration)) // fails only where all else does
	}
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	buffer := make([]byte, chunk)
	for err == nil {
		var n int
		n, err = conn.Write(buffer)
		c.carried(n)
	}
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		return s, err // it has ended by itself
	}
	s.processing = time.Since(begin) - s.connect
	return s, l.drain(conn.(*net.TCPConn))
}

// drain waits until the server has taken all.
func (l Load) drain(conn *net.TCPConn) error {
	if err := conn.SetDeadline(time.Now().Add(l.Timeout)); err != nil {
		return err
	}
	if err := conn.CloseWrite(); err != nil {
		return err
	}
	_, err := io.Copy(io.Discard, conn)
	return err
}
