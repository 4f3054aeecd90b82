package traffic

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// udpClient is a client with its sockets.
type udpClient struct {
	Load
	sources *sources
	open    map[netip.AddrPort]net.Conn // with KeepAlive
}

// reuseAndHear has the socket be told what ICMP says, and not only that a port is unreachable.
func reuseAndHear(network, to string, c syscall.RawConn) (err error) {
	level, option := unix.IPPROTO_IP, unix.IP_RECVERR
	if network == "udp6" {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_RECVERR
	}
	controlled := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, option, 1) })
	return errors.Join(controlled, err, reuse(network, to, c))
}

func (c *udpClient) ask(number int, to target) (s sample, err error) {
	begin := time.Now()
	conn := c.open[to.AddrPort]
	if conn == nil {
		if conn, err = dial(&net.Dialer{Control: reuseAndHear}, "udp", to.name, c.sources); err != nil {
			return s, err
		}
		s.connected, s.connect = true, time.Since(begin)
	}
	_ = conn.SetDeadline(begin.Add(c.Timeout)) // fails only where all else does
	err = exchangeDatagrams(conn, uint64(number), &s)
	if c.KeepAlive && err == nil {
		if c.open == nil {
			c.open = map[netip.AddrPort]net.Conn{}
		}
		c.open[to.AddrPort] = conn
		return s, nil
	}
	delete(c.open, to.AddrPort)
	_ = conn.Close()
	return s, err
}

// exchangeDatagrams sends the number of a request, which is to come back.
func exchangeDatagrams(c net.Conn, number uint64, s *sample) error {
	begin := time.Now()
	if _, err := c.Write(binary.BigEndian.AppendUint64(nil, number)); err != nil {
		return err
	}
	sent := time.Now()
	answer := make([]byte, 64)
	n, err := c.Read(answer)
	if err != nil {
		return err
	}
	s.waiting, s.processing, s.bytes = time.Since(sent), time.Since(begin), n
	if n != 8 || binary.BigEndian.Uint64(answer) != number {
		return errOtherAnswer
	}
	return nil
}

func (c *udpClient) close() {
	for _, conn := range c.open {
		_ = conn.Close()
	}
}
