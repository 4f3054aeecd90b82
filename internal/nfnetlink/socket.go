// Package nfnetlink speaks to netfilter on one long-lived netlink socket: transactions of nf_tables and listings. For a
// transaction the kernel says which message it refuses. A listing begins anew when its subject changes. Why no library:
// see docs/dependencies.md.
//
//	Begin ─► Encoder: Message, attributes, Finish, … ─► Commit: all of it or none, or a Refusal
//	                                                    Check: the same, but nothing is done
//	Request ─► Get, Dump ─► Each(attributes) ─► Attribute, Text
package nfnetlink

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Socket is to be kept: closing one with deletions pending waits for an RCU grace period.
type Socket struct {
	// Room is about how many bytes a transaction may have.
	Room int
	// Patience bounds the pauses before a list begins anew, which grow: the last one is the first that is as long.
	Patience time.Duration

	fd      int
	seq     uint32 // of the last message
	batch   Encoder
	receive []byte
}

const (
	sendBuffer    = 128 << 20 // a transaction is one netlink message and must fit
	receiveBuffer = 16 << 20
	readSize      = 1 << 17
	timeout       = 60 // seconds; the kernel answers at once unless it hangs
	patience      = 100 * time.Millisecond
)

// Dial opens a socket in the network namespace of the calling thread.
func Dial() (*Socket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	s := Over(fd)
	s.Patience = patience
	err = errors.Join(
		unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: timeout}),
		setBuffer(fd, unix.SO_SNDBUFFORCE, unix.SO_SNDBUF, sendBuffer),
		setBuffer(fd, unix.SO_RCVBUFFORCE, unix.SO_RCVBUF, receiveBuffer))
	if err == nil {
		s.Room, err = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("set up netlink socket: %w", err), s.Close())
	}
	return s, nil
}

// Over makes a Socket of a descriptor, which it owns: of a netlink socket or, in tests, of an end of a pair
// (SOCK_SEQPACKET). Room is for the caller to set. Without Patience a list does not begin anew.
func Over(fd int) *Socket { return &Socket{fd: fd, receive: make([]byte, readSize)} }

// setBuffer sets the size of a buffer. The root of a user namespace may not exceed the system's limit
// (net.core.wmem_max and rmem_max).
func setBuffer(fd, force, limited, size int) error {
	err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, force, size)
	if errors.Is(err, unix.EPERM) {
		return unix.SetsockoptInt(fd, unix.SOL_SOCKET, limited, size)
	}
	return err
}

// Close may be repeated: by then the number may be that of another file.
func (s *Socket) Close() error {
	fd := s.fd
	if s.fd = -1; fd < 0 {
		return nil
	}
	return unix.Close(fd)
}

// Begin starts a transaction, to which messages are appended. It takes the place of the one before.
func (s *Socket) Begin() *Encoder {
	s.batch.B = s.batch.B[:0]
	s.batch.bracket(unix.NFNL_MSG_BATCH_BEGIN)
	return &s.batch
}

// Refusal is the kernel's answer to one message of a transaction.
type Refusal struct {
	Message int // the how manieth, from 0; -1: the transaction as a whole
	Err     syscall.Errno
}

func (r *Refusal) Error() string { return fmt.Sprintf("message %d: %v", r.Message, r.Err) }

// Unwrap is the kernel's error.
func (r *Refusal) Unwrap() error { return r.Err }

// Commit has the kernel perform what was appended since Begin, all or none of it (nfnetlink_rcv_batch in its
// net/netfilter/nfnetlink.c). The error is the Refusal of the first message that is refused, if one is.
func (s *Socket) Commit() error { return s.perform(true) }

// Check has the kernel check a transaction and then forget it: that is what it does where there is no end.
func (s *Socket) Check() error { return s.perform(false) }

// perform asks the kernel to acknowledge the last message only.
func (s *Socket) perform(end bool) error {
	first := s.seq + 1
	b := s.batch.B
	at := number(b, first)
	s.seq = binary.NativeEndian.Uint32(b[at+offsetSequence:])
	flags := b[at+offsetFlags:]
	binary.NativeEndian.PutUint16(flags, binary.NativeEndian.Uint16(flags)|unix.NLM_F_ACK)
	if end {
		s.batch.bracket(unix.NFNL_MSG_BATCH_END)
	}
	s.drain()
	if err := s.send(s.batch.B); err != nil {
		return err
	}
	return s.verdict(first)
}

// verdict reads the kernel's answers to a batch. An error for the batch's begin stands for all.
func (s *Socket) verdict(first uint32) (err error) {
	for done := false; !done; {
		messages, readErr := s.read()
		if readErr != nil {
			return readErr
		}
		for _, m := range messages {
			n := m.Header.Seq - first
			if m.Header.Type != unix.NLMSG_ERROR || n > s.seq-first {
				continue
			}
			done = done || n == 0 || m.Header.Seq == s.seq
			if e := errno(m.Data); e != 0 && err == nil {
				err = &Refusal{int(n) - 1, e}
			}
		}
	}
	return err
}

func (s *Socket) send(b []byte) error {
	for {
		err := unix.Sendto(s.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		if !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("send to netlink socket", err)
		}
	}
}

// read returns the messages of one datagram. They are valid until the next call.
func (s *Socket) read() ([]syscall.NetlinkMessage, error) {
	for {
		n, _, err := unix.Recvfrom(s.fd, s.receive, 0)
		if err == nil && n == 0 { // the kernel sends no such datagram; who reads on would wait for ever
			return nil, fmt.Errorf("receive from netlink socket: %w", io.ErrUnexpectedEOF)
		}
		if err == nil {
			return syscall.ParseNetlinkMessage(s.receive[:n])
		}
		if !errors.Is(err, unix.EINTR) {
			return nil, os.NewSyscallError("receive from netlink socket", err)
		}
	}
}

// errno is the error number in an NLMSG_ERROR message; 0 acknowledges.
func errno(body []byte) syscall.Errno {
	if len(body) < 4 {
		return unix.EPROTO
	}
	return syscall.Errno(-int32(binary.NativeEndian.Uint32(body)))
}

// drain throws away answers that an earlier, interrupted exchange left in the socket.
func (s *Socket) drain() {
	for {
		n, _, err := unix.Recvfrom(s.fd, s.receive, unix.MSG_DONTWAIT)
		if err != nil && !errors.Is(err, unix.ENOBUFS) || err == nil && n == 0 {
			return
		}
	}
}

// Generation is the number of the ruleset, which grows by one with each transaction of anybody.
func (s *Socket) Generation() (generation uint32, err error) {
	err = s.Get(Request{Kind: NFTables | unix.NFT_MSG_GETGEN, Each: func(attrs []byte) {
		generation = Uint32(attrs, unix.NFTA_GEN_ID)
	}})
	return generation, err
}

// Request asks for an object, or for all objects of a kind.
type Request struct {
	Kind   uint16 // subsystem and message: see NFTables
	Family uint8
	Filter Encoder // attributes of the request
	// Reset forgets what Each has seen. If another process changes the ruleset meanwhile, the kernel says
	// so and the listing begins anew. Get does not need it.
	Reset func()
	Each  func(attrs []byte)
	// Torn, if not nil, reports whether a list must begin anew although the kernel has not said so.
	Torn func() bool
}

// Get calls Each with the object.
func (s *Socket) Get(r Request) error { return s.ask(r, 0) }

// Do has the kernel do what a message says, and calls Each with what it answers.
func (s *Socket) Do(r Request) error { return s.ask(r, unix.NLM_F_ACK) }

const sizeofNfgenmsg = 4

// ErrInterrupted says that a list cannot be trusted, as often as it began anew.
var ErrInterrupted = errors.New("the ruleset changes faster than it can be listed")

// Dump lists all objects of a kind. In a table or set that there is not, there are none.
func (s *Socket) Dump(r Request) (err error) {
	for pause := time.Duration(0); ; pause = max(2*pause, time.Millisecond) {
		time.Sleep(pause) // the process or the kernel worker that changes the list needs the CPU, too
		r.Reset()
		if err = s.ask(r, unix.NLM_F_DUMP); !errors.Is(err, ErrInterrupted) || pause >= s.Patience {
			break
		}
	}
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// ask sends a request and passes each object of the answer to r.Each. Messages with other sequence numbers answer
// earlier requests that were given up. The kernel marks a list during which its objects changed (NLM_F_DUMP_INTR). Such
// a list, and one that r.Torn finds incomplete, is ErrInterrupted; ask reads it to its end first.
func (s *Socket) ask(r Request, flags uint16) (err error) {
	s.drain()
	s.seq++
	var e Encoder
	start := e.Message(r.Kind, flags, r.Family)
	e.B = append(e.B, r.Filter.B...)
	e.Finish(start)
	number(e.B, s.seq)
	if err := s.send(e.B); err != nil {
		return err
	}
	interrupted := false
	for done := false; !done; {
		messages, readErr := s.read()
		if readErr != nil {
			return readErr
		}
		for _, m := range messages {
			if m.Header.Seq != s.seq {
				continue
			}
			switch {
			case m.Header.Type == unix.NLMSG_DONE, m.Header.Type == unix.NLMSG_ERROR:
				done = true
				if e := errno(m.Data); e != 0 {
					err = e
				}
			case len(m.Data) >= sizeofNfgenmsg:
				r.Each(m.Data[sizeofNfgenmsg:])
				done = done || flags == 0
			}
			interrupted = interrupted || m.Header.Flags&unix.NLM_F_DUMP_INTR != 0
		}
	}
	if err == nil && (interrupted || r.Torn != nil && r.Torn()) {
		err = ErrInterrupted
	}
	return err
}
