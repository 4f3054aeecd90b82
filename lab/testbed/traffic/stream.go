package traffic

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync/atomic"
	"time"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// Open opens more streams, spread over the paths, and returns when each has been answered.
func (l *Watch) Open(n int) error {
	if len(l.spec.Paths) == 0 {
		return nil
	}
	for range n {
		l.mu.Lock()
		number := l.streams
		l.streams++
		l.mu.Unlock()
		if err := l.open(number); err != nil {
			return err
		}
	}
	return nil
}

// open opens the stream of that number.
func (l *Watch) open(number int) error {
	w := l.client(Streams, l.spec.Paths[number%len(l.spec.Paths)])
	start := time.Now()
	w.opened = start
	l.begin(w)
	s, backend, err := l.dial(w.Path, number)
	if err != nil {
		l.failed(w, err, time.Since(start))
		l.retire(w)
		return fmt.Errorf("open a stream from %s: %w", w.Path, err)
	}
	l.answered(w, backend, time.Since(start))
	ctx, stop := context.WithCancel(l.ctx)
	l.group.Go(func() { s.send(ctx, l.spec.Pause) })
	l.group.Go(func() {
		defer l.retire(w)
		defer s.conn.Close()
		defer stop()
		l.receive(w, s)
	})
	return nil
}

// stream is a connection on which everything that is sent comes back.
type stream struct {
	conn   *net.TCPConn
	lines  *bufio.Reader
	what   pattern
	first  int   // where in the pattern it begins
	chunk  int   // how many bytes are sent at once
	ahead  int64 // how many chunks may not have come back
	sent   atomic.Int64
	got    atomic.Int64
	ending atomic.Bool           // no more is sent
	unsent atomic.Pointer[error] // why sending failed: the kernel tells one of sender and receiver, the other sees EOF
}

func (l *Watch) dial(p Path, number int) (_ *stream, backend string, err error) {
	ctx, end := context.WithTimeout(context.WithoutCancel(l.ctx), l.spec.Timeout)
	defer end()
	c, err := l.bed.Dial(ctx, p.From, model.TCP, p.To)
	if err != nil {
		return nil, "", err
	}
	// Most are small, as those of remote terminals, and some fill packets, and the buffers of proxies that carry them.
	sizes := [...]int{16, 100, 1000, 64, 3000, 16, 40000, 200}
	s := &stream{
		conn: c.(*net.TCPConn), lines: bufio.NewReaderSize(c, 1<<16), what: l.pattern,
		first: 7919 * number, chunk: sizes[number%len(sizes)],
		ahead: int64(l.spec.Ahead),
	}
	if err = c.SetReadDeadline(time.Now().Add(l.spec.Timeout)); err == nil {
		backend, err = s.lines.ReadString('\n')
	}
	if err == nil {
		_, err = c.Write([]byte{testbed.Echo})
	}
	if err != nil {
		_ = c.Close()
	}
	backend, _, _ = strings.Cut(backend, " ")
	return s, backend, err
}

// pattern is what streams carry, again and again. Its length is a prime, so that nothing that is lost, or comes twice,
// fits.
type pattern []byte

func newPattern() pattern {
	const prime = 65521
	p := make(pattern, prime)
	_, _ = rand.NewChaCha8([32]byte{}).Read(p) // it has no errors
	return p
}

// at is some of it, from an offset on.
func (p pattern) at(offset, n int) []byte {
	b := make([]byte, 0, n)
	for len(b) < n {
		from := (offset + len(b)) % len(p)
		b = append(b, p[from:min(len(p), from+n-len(b))]...)
	}
	return b
}

// send sends a chunk after each pause, unless several have not come back. Whatever is wrong, receive sees.
func (s *stream) send(ctx context.Context, pause time.Duration) {
	pace := time.NewTicker(pause)
	defer pace.Stop()
	for ctx.Err() == nil {
		if sent := s.sent.Load(); sent-s.got.Load() < s.ahead*int64(s.chunk) {
			n, err := s.conn.Write(s.what.at(s.first+int(sent), s.chunk))
			if s.sent.Add(int64(n)); err != nil {
				s.unsent.Store(&err)
				return
			}
		}
		select {
		case <-ctx.Done():
		case <-pace.C:
		}
	}
	s.ending.Store(true)
	_ = s.conn.CloseWrite()
}

// receive compares what comes back, until the stream has ended in order or is broken.
func (l *Watch) receive(w *client, s *stream) {
	b, last := make([]byte, 1<<16), time.Now()
	fail := func(err error) { l.failed(w, fmt.Errorf("after %d bytes: %w", s.got.Load(), err), time.Since(last)) }
	for {
		_ = s.conn.SetReadDeadline(last.Add(l.spec.Timeout))
		n, err := s.lines.Read(b)
		if !bytes.Equal(b[:n], s.what.at(s.first+int(s.got.Load()), n)) {
			fail(errors.New("what came back is not what was sent"))
			return
		}
		s.got.Add(int64(n))
		switch {
		case errors.Is(err, io.EOF) && s.ending.Load() && s.got.Load() == s.sent.Load():
			return
		case err != nil:
			if cause := s.unsent.Load(); cause != nil {
				err = errors.Join(err, *cause)
			}
			fail(err)
			return
		}
		l.answered(w, "", time.Since(last))
		last = time.Now()
	}
}
