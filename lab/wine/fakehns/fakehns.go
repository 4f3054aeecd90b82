// Package fakehns serves the Host Networking Service to programs in Wine.
//
//	program ─► hns.System or hnslib ─► computenetwork.dll (lab/wine/dll) ─TCP─► Server ─► hnssim.Service
//
// The server runs on any system: beside Wine, where a test can look into the service, fail its calls and restart it, or
// in the program itself. A program finds the server by the variable FAKE_HNS.
package fakehns

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"

	"fairlead.dev/fairlead/dataplane/kernelspace/hns"
	"fairlead.dev/fairlead/lab/hnssim"
)

// Variable is that of the environment which has the server's address.
const Variable = "FAKE_HNS"

// longest bounds a message: the list of a hundred thousand objects.
const longest = 64 << 20

// call is what a program asks: an operation such as CreateEndpoint, and its arguments.
type call struct {
	operation string
	id        guid
	handle    uint64
	text      string // JSON, or the path of HNSCall
}

// answer is what it gets.
type answer struct {
	err    error
	handle uint64
	text   string
}

// Server answers calls.
type Server struct {
	service  *hnssim.Service
	listener net.Listener
	tasks    sync.WaitGroup

	mu      sync.Mutex
	conns   map[net.Conn]struct{}
	closed  bool
	handles map[uint64]object
	next    uint64
}

// object is what a handle is of.
type object struct {
	kind hnssim.Kind
	id   string
}

// Start starts a server on a port of the loopback interface.
func Start(service *hnssim.Service) (*Server, error) { return StartAt(service, "127.0.0.1:0") }

// StartAt starts a server at an address, such as that of one that was closed.
func StartAt(service *hnssim.Service, address string) (*Server, error) {
	l, err := net.Listen("tcp4", address)
	if err != nil {
		return nil, fmt.Errorf("fake HNS: %w", err)
	}
	s := &Server{service: service, listener: l, conns: map[net.Conn]struct{}{}, handles: map[uint64]object{}}
	s.tasks.Go(s.accept)
	return s, nil
}

// Handles is how many handles are open.
func (s *Server) Handles() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.handles)
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
			_, err = c.Write(s.do(call).bytes())
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

func read(r io.Reader) (c call, err error) {
	var n uint32
	if err := binary.Read(r, binary.LittleEndian, &n); err != nil {
		return c, err
	}
	if n < 25 || n > longest {
		return c, fmt.Errorf("a call of %d bytes", n)
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(r, b); err != nil {
		return c, err
	}
	c.handle = binary.LittleEndian.Uint64(b)
	copy(c.id[:], b[8:])
	name := int(b[24])
	if len(b) < 25+name {
		return c, fmt.Errorf("a call of %d bytes, whose name has %d", n, name)
	}
	c.operation, c.text = string(b[25:25+name]), string(b[25+name:])
	return c, nil
}

func (a answer) bytes() []byte {
	var result uint32
	var record string
	if a.err != nil {
		result = uint32(hns.ErrInvalid)
		errors.As(a.err, (*hns.Error)(&result))
		text, _ := json.Marshal(map[string]any{"Success": false, "Error": a.err.Error(), "ErrorCode": result})
		record = string(text)
	}
	b := binary.LittleEndian.AppendUint32(nil, uint32(16+len(a.text)+len(record)))
	b = binary.LittleEndian.AppendUint32(b, result)
	b = binary.LittleEndian.AppendUint64(b, a.handle)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(a.text)))
	return append(append(b, a.text...), record...)
}
