package userspace_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/userspace"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/model"
)

func TestMain(m *testing.M) {
	vm.Guest()
	os.Exit(m.Run())
}

// TestSCTP_messages: a backend gets messages as a client has sent them, each whole, over its stream and with its
// protocol. One of them is larger than the buffers of the plane.
func TestSCTP_messages(t *testing.T) {
	if !testbed.HasProtocol(model.SCTP) {
		vm.Replay(t, "SCTP", "^"+t.Name()+"$")
		return
	}
	byEachWay(t, testMessages)
}

func testMessages(t *testing.T, way userspace.Redirect) {
	n := start(t, userspace.Options{Redirect: way})
	listener := n.sctpSocket("pod-a", [4]byte{10, 244, 1, 11}, 7777)
	if err := unix.Listen(listener, 1); err != nil {
		t.Fatal(err)
	}
	n.sync("sctp", "10.244.1.11:7777")
	client := n.sctpSocket("client", [4]byte{10, 244, 1, 20}, 0)
	if err := unix.Connect(client, &unix.SockaddrInet4{Addr: [4]byte{10, 96, 0, 10}, Port: 80}); err != nil {
		t.Fatal(os.NewSyscallError("connect", err))
	}
	backend, _, err := unix.Accept(listener)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(backend) })
	timeout := unix.NsecToTimeval(eventually.Patience().Nanoseconds())
	if err := unix.SetsockoptTimeval(backend, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout); err != nil {
		t.Fatal(err)
	}
	const rcvInfo = 32 // SCTP_RECVRCVINFO
	if err := unix.SetsockoptInt(backend, unix.IPPROTO_SCTP, rcvInfo, 1); err != nil {
		t.Fatal(err)
	}
	var want, got strings.Builder
	for i, size := range []int{1, 3, 100_000, 2} {
		fmt.Fprintf(&want, "%d bytes, stream %d, protocol %d\n", size, i, 40+i)
		n.sendSCTP(client, size, uint16(i))
	}
	for range 4 {
		got.WriteString(n.receiveSCTP(backend))
	}
	if got.String() != want.String() {
		t.Errorf("%s, not\n%s", got.String(), want.String())
	}
}

// sctpSocket is one at an address of a place.
func (n *node) sctpSocket(place testbed.Place, at [4]byte, port int) (fd int) {
	n.Helper()
	n.at(place, func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP)
		if err == nil {
			err = unix.Bind(fd, &unix.SockaddrInet4{Addr: at, Port: port})
		}
		return err
	})
	n.Cleanup(func() { unix.Close(fd) })
	return fd
}

// sendSCTP sends a message over a stream, with a protocol that tells it, too.
func (n *node) sendSCTP(fd, size int, stream uint16) {
	n.Helper()
	const sndInfo, sizeofSndInfo = 2, 16 // SCTP_SNDINFO
	info := make([]byte, unix.CmsgSpace(sizeofSndInfo))
	header := (*unix.Cmsghdr)(unsafe.Pointer(&info[0]))
	header.Level, header.Type = unix.IPPROTO_SCTP, sndInfo
	header.SetLen(unix.CmsgLen(sizeofSndInfo))
	binary.NativeEndian.PutUint16(info[unix.CmsgLen(0):], stream)
	binary.BigEndian.PutUint32(info[unix.CmsgLen(4):], 40+uint32(stream))
	if err := unix.Sendmsg(fd, bytes.Repeat([]byte("x"), size), info, nil, 0); err != nil {
		n.Fatal(os.NewSyscallError("sendmsg", err))
	}
}

// receiveSCTP tells of one message.
func (n *node) receiveSCTP(fd int) string {
	n.Helper()
	buf, info := make([]byte, 1<<20), make([]byte, 256)
	for size := 0; ; {
		got, control, flags, _, err := unix.Recvmsg(fd, buf, info, 0)
		if err != nil || got == 0 {
			n.Fatalf("after %d bytes: %v", size, err)
		}
		if size += got; flags&unix.MSG_EOR == 0 {
			continue
		}
		messages, err := unix.ParseSocketControlMessage(info[:control])
		if err != nil || len(messages) == 0 {
			n.Fatalf("control messages %v, %v", messages, err)
		}
		data := messages[0].Data
		return fmt.Sprintf("%d bytes, stream %d, protocol %d\n", size,
			binary.NativeEndian.Uint16(data), binary.BigEndian.Uint32(data[8:]))
	}
}

// TestSCTP_portAgain: two clients are served from the same port of the plane, one after the other. The backend sees
// each one's own address, although connection tracking still knows the flow of the first. It ends each association, of
// which the client learns, and the port is free although the client keeps its socket.
func TestSCTP_portAgain(t *testing.T) {
	if !testbed.HasProtocol(model.SCTP) {
		vm.Replay(t, "SCTP", "^"+t.Name()+"$")
		return
	}
	n := start(t, userspace.Options{Redirect: userspace.ByNAT})
	n.onePort()
	listener := n.sctpSocket("pod-a", [4]byte{10, 244, 1, 11}, 7777)
	if err := unix.Listen(listener, 1); err != nil {
		t.Fatal(err)
	}
	wait := func(fd int, most time.Duration) {
		timeout := unix.NsecToTimeval(most.Nanoseconds())
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout); err != nil {
			t.Fatal(os.NewSyscallError("setsockopt", err))
		}
	}
	wait(listener, 2*time.Second) // of a busy machine
	n.sync("sctp", "10.244.1.11:7777")
	for _, from := range []struct {
		place testbed.Place
		at    [4]byte
	}{{"client", [4]byte{10, 244, 1, 20}}, {"pod-b", [4]byte{10, 244, 2, 13}}, {"client", [4]byte{10, 244, 1, 20}}} {
		eventually.Nil(t, "the port is free again", func() error {
			client := n.sctpSocket(from.place, from.at, 0)
			wait(client, eventually.Patience())
			if err := unix.Connect(client, &unix.SockaddrInet4{Addr: [4]byte{10, 96, 0, 10}, Port: 80}); err != nil {
				return os.NewSyscallError("connect", err)
			}
			backend, peer, err := unix.Accept(listener)
			if err != nil {
				return os.NewSyscallError("accept", err)
			}
			unix.Close(backend)
			if size, _, err := unix.Recvfrom(client, make([]byte, 1), 0); size != 0 || err != nil {
				t.Errorf("the client gets %d bytes, %v", size, err)
			}
			if saw := peer.(*unix.SockaddrInet4).Addr; saw != from.at {
				t.Errorf("the backend sees %v, not %v", saw, from.at)
			}
			return nil
		})
	}
}
