// Package fakehns serves the Host Networking Service to programs in Wine.
//
//	program ─► hnslib ─► computenetwork.dll (lab/wine/dll) ─TCP─► Server ─► HNS, such as hnssim.Service
//
// The server runs on any system: beside Wine, where a test can look into the service, fail its calls and restart it, or
// in the program itself. A program finds the server by the variable FAKE_HNS.
package fakehns

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
)

// Variable is that of the environment which has the server's address.
const Variable = "FAKE_HNS"

// longest bounds a message: the list of a hundred thousand objects.
const longest = 64 << 20

// Call is what a program asks: an operation such as CreateEndpoint, and its arguments.
type Call struct {
	Operation string
	ID        [16]byte // as Windows keeps a GUID
	Handle    uint64
	Text      string // JSON, or the path of HNSCall
}

// Answer is what it gets.
type Answer struct {
	Result uint32 // an HRESULT: 0 is success
	ID     [16]byte
	Handle uint64
	Text   string
	Error  string
}

// Server answers calls.
type Server struct {
	answer   func(Call) Answer
	listener net.Listener
	mu       sync.Mutex
	conns    map[net.Conn]struct{}
	closed   bool
	tasks    sync.WaitGroup
}

// Start starts a server on a port of the loopback interface.
func Start(answer func(Call) Answer) (*Server, error) { return listen("127.0.0.1:0", answer) }

func listen(address string, answer func(Call) Answer) (*Server, error) {
	l, err := net.Listen("tcp4", address)
	if err != nil {
		return nil, fmt.Errorf("fake HNS: %w", err)
	}
	s := &Server{answer: answer, listener: l, conns: map[net.Conn]struct{}{}}
	s.tasks.Go(s.accept)
	return s, nil
}

// Address is the value of Variable.
func (s *Server) Address() string { return s.listener.Addr().String() }

// Close ends the server and its connections. A program that calls finds that HNS is not running.
func (s *Server) Close() error {
	s.mu.Lock()
	s.closed = true
	for c := range s.conns {
		c.Close()
	}
	s.mu.Unlock()
	err := s.listener.Close()
	s.tasks.Wait()
	return err
}

func (s *Server) accept() {
	for {
		c, err := s.listener.Accept()
		if err != nil {
			return
		}
		s.mu.Lock()
		if s.closed {
			c.Close()
		} else {
			s.conns[c] = struct{}{}
			s.tasks.Go(func() { s.serve(c) })
		}
		s.mu.Unlock()
	}
}

func (s *Server) serve(c net.Conn) {
	r := bufio.NewReader(c)
	for {
		call, err := read(r)
		if err == nil {
			_, err = c.Write(s.answer(call).bytes())
		}
		if err == nil {
			continue
		}
		if !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
			fmt.Fprintf(os.Stderr, "fake HNS: %v\n", err)
		}
		c.Close()
		s.mu.Lock()
		delete(s.conns, c)
		s.mu.Unlock()
		return
	}
}

func read(r io.Reader) (call Call, err error) {
	var n uint32
	if err := binary.Read(r, binary.LittleEndian, &n); err != nil {
		return call, err
	}
	if n < 25 || n > longest {
		return call, fmt.Errorf("a call of %d bytes", n)
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(r, b); err != nil {
		return call, err
	}
	call.Handle = binary.LittleEndian.Uint64(b)
	copy(call.ID[:], b[8:])
	name := int(b[24])
	if len(b) < 25+name {
		return call, fmt.Errorf("a call of %d bytes, whose name has %d", n, name)
	}
	call.Operation, call.Text = string(b[25:25+name]), string(b[25+name:])
	return call, nil
}

func (a Answer) bytes() []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(32+len(a.Text)+len(a.Error)))
	b = binary.LittleEndian.AppendUint32(b, a.Result)
	b = binary.LittleEndian.AppendUint64(b, a.Handle)
	b = append(b, a.ID[:]...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(a.Text)))
	return append(append(b, a.Text...), a.Error...)
}
