package ipvs

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"
)

// errUnanswered is what is known when the kernel's answers to some requests do not arrive.
var errUnanswered = errors.New("answers of the kernel were lost")

// answerSize is more than an error and the request that it repeats.
const answerSize = 4096

// answers reads the kernel's answers to messages, by their sequence numbers, until it has acknowledged the last one.
// Receive of package netlink does not tell which message an error is about.
//
// When the system call that sends messages returns, the kernel has done them and queued its answers. A missing answer
// was lost. Where the queue overflows, the socket reports that before the queued answers, and only once until the queue
// has been emptied. So reading goes on, and the next loss is reported as well.
func (c *Client) answers(last uint32) (map[uint32]unix.Errno, error) {
	var lost error
	found := map[uint32]unix.Errno{}
	buffer := make([]byte, answerSize)
	for acknowledged := false; !acknowledged || lost != nil; {
		n, err := c.receive(buffer)
		switch {
		case errors.Is(err, unix.ENOBUFS):
			lost = err
			continue
		case errors.Is(err, unix.EAGAIN):
			return nil, fmt.Errorf("%w: %w", errUnanswered, cmp.Or(lost, err))
		case err != nil:
			return nil, err
		}
		messages, err := syscall.ParseNetlinkMessage(buffer[:n])
		if err != nil {
			return nil, fmt.Errorf("parse an answer of %d bytes: %w", n, err)
		}
		for _, m := range messages {
			if m.Header.Type == unix.NLMSG_ERROR && len(m.Data) >= 4 {
				found[m.Header.Seq] = unix.Errno(-int32(binary.NativeEndian.Uint32(m.Data)))
				acknowledged = acknowledged || m.Header.Seq == last
			}
		}
	}
	return found, nil
}

// receive reads a datagram that is in the socket. It does not wait for one: the error is then EAGAIN.
func (c *Client) receive(buffer []byte) (n int, err error) {
	raw, err := c.conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	control := raw.Control(func(fd uintptr) {
		n, _, err = unix.Recvfrom(int(fd), buffer, unix.MSG_DONTWAIT)
	})
	if control != nil {
		return 0, control
	}
	return n, err
}
