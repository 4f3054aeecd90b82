package socket

import (
	"encoding/binary"
	"time"

	"golang.org/x/sys/unix"
)

// Unheard tells from a struct tcp_info whether the peer of a connection is silent for some seconds although it was sent
// data again and again. A peer that has no room for data answers all the same.
func Unheard(info []byte) bool {
	const (
		retransmits, unacked, lastAck = 2, 24, 56 // where tcpi_retransmits, _unacked and _last_ack_recv are
		times                         = 4         // after three seconds, if answers take a fifth of a second or less
		silence                       = 3 * time.Second
	)
	number := func(at int) uint32 { return binary.NativeEndian.Uint32(info[at:]) }
	return len(info) >= lastAck+4 && info[retransmits] >= times && number(unacked) > 0 &&
		time.Duration(number(lastAck))*time.Millisecond >= silence
}

// Unheard does so for the connection.
func (c *Conn) Unheard() (is bool) {
	info := make([]byte, unix.SizeofTCPInfo)
	_ = c.Do(func(fd int) error { // fails only if it is closed
		err := GetOption(fd, unix.SOL_TCP, unix.TCP_INFO, info)
		is = err == nil && Unheard(info)
		return err
	})
	return is
}
