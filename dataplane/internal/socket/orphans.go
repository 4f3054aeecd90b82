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

// Idle tells from a struct tcp_info for how long a connection has carried no data, either way; 0: there is some that is
// not acknowledged.
func Idle(info []byte) time.Duration {
	const unacked, lastSent, lastReceived = 24, 44, 52 // where tcpi_unacked, _last_data_sent and _last_data_recv are
	number := func(at int) uint32 { return binary.NativeEndian.Uint32(info[at:]) }
	if len(info) < lastReceived+4 || number(unacked) > 0 {
		return 0
	}
	return time.Duration(min(number(lastSent), number(lastReceived))) * time.Millisecond
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
