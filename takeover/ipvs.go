package takeover

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/mdlayher/genetlink"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Commands and attributes of include/uapi/linux/ip_vs.h.
const (
	ipvsName       = "IPVS"
	ipvsVersion    = 1
	ipvsDelService = 3
	ipvsGetService = 4
	ipvsSetDest    = 6
	ipvsGetDest    = 8

	ipvsService = 1 // attributes of commands
	ipvsDest    = 2

	serviceFamily   = 1 // of services
	serviceProtocol = 2
	serviceAddress  = 3
	servicePort     = 4
	serviceFWMark   = 5

	destWeight   = 4 // of destinations
	destActive   = 7
	destInactive = 8
	destPersist  = 9
	destStats    = 10
	destStats64  = 12
)

// servedPort is a port of one protocol; 0 is all of them.
type servedPort struct {
	protocol uint8
	port     uint16
}

// server is a virtual server of IPVS. What identifies it and its destinations is kept as the kernel
// said it, so that nothing is lost when it is sent back.
type server struct {
	address  netip.Addr
	port     servedPort
	identity []byte
	dests    []dest
}

type dest struct {
	attributes  []byte // all that may be sent, but the weight
	weight      uint32
	connections int
}

func (s server) connections() (n int) {
	for _, d := range s.dests {
		n += d.connections
	}
	return n
}

// quiet reports whether no destination takes new connections.
func (s server) quiet() bool {
	return !slices.ContainsFunc(s.dests, func(d dest) bool { return d.weight != 0 })
}

func (s server) String() string {
	return fmt.Sprintf("ipvs virtual server %s protocol %d", netip.AddrPortFrom(s.address, s.port.port), s.port.protocol)
}

// director is the IPVS of the calling thread's network namespace.
type director struct{ family uint16 }

// openDirector is nil if there is no virtual server; it does not load IPVS to find out.
func openDirector() (*director, error) {
	table, err := os.ReadFile("/proc/thread-self/net/ip_vs")
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("ipvs: %w", err)
	}
	const header = 3 // lines
	if strings.Count(string(table), "\n") <= header {
		return nil, nil
	}
	conn, err := genetlink.Dial(nil)
	if err != nil {
		return nil, fmt.Errorf("ipvs: %w", err)
	}
	defer conn.Close()
	family, err := conn.GetFamily(ipvsName)
	if err != nil {
		return nil, fmt.Errorf("ipvs: %w", err)
	}
	return &director{family.ID}, nil
}

func (d *director) call(command uint8, flags int, attributes ...nl.NetlinkRequestData) ([][]byte, error) {
	r := nl.NewNetlinkRequest(int(d.family), flags)
	r.AddRawData([]byte{command, ipvsVersion, 0, 0}) // nl.Genlmsg has no reserved bytes, and is read past its end
	for _, a := range attributes {
		r.AddRawData(a.Serialize())
	}
	return r.Execute(unix.NETLINK_GENERIC, 0)
}

// dump repeats a request for many objects until none of them changed meanwhile.
func (d *director) dump(command uint8, attributes ...nl.NetlinkRequestData) (messages [][]byte, err error) {
	for range nftTries {
		messages, err = d.call(command, unix.NLM_F_DUMP, attributes...)
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return messages, err
}

// servers are all virtual servers with their destinations, but those for firewall marks.
func (d *director) servers() ([]server, error) {
	messages, err := d.dump(ipvsGetService)
	if err != nil {
		return nil, fmt.Errorf("ipvs: list virtual servers: %w", err)
	}
	var servers []server
	for _, m := range messages {
		s, ok := parseServer(inMessage(m, nl.SizeofGenlmsg)[ipvsService])
		if !ok {
			continue
		}
		if s.dests, err = d.destinations(s); err != nil {
			return nil, err
		}
		servers = append(servers, s)
	}
	return servers, nil
}

func parseServer(raw []byte) (server, bool) {
	a := attributes(raw)
	family, protocol, address, port := a[serviceFamily], a[serviceProtocol], a[serviceAddress], a[servicePort]
	if a[serviceFWMark] != nil || len(family) != 2 || len(protocol) != 2 || len(port) != 2 || len(address) != 16 {
		return server{}, false
	}
	s := server{port: servedPort{uint8(binary.NativeEndian.Uint16(protocol)), binary.BigEndian.Uint16(port)}}
	s.address = netip.AddrFrom16([16]byte(address))
	if binary.NativeEndian.Uint16(family) == unix.AF_INET {
		s.address = netip.AddrFrom4([4]byte(address[:4]))
	}
	for _, kind := range []uint16{serviceFamily, serviceProtocol, serviceAddress, servicePort} {
		s.identity = append(s.identity, nl.NewRtAttr(int(kind), a[kind]).Serialize()...)
	}
	return s, true
}

func (s server) attribute() nl.NetlinkRequestData {
	return nl.NewRtAttr(ipvsService|unix.NLA_F_NESTED, s.identity)
}

func (d *director) destinations(s server) ([]dest, error) {
	messages, err := d.dump(ipvsGetDest, s.attribute())
	if errors.Is(err, unix.ESRCH) { // the server went meanwhile
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%s: list real servers: %w", s, err)
	}
	var dests []dest
	for _, m := range messages {
		dests = append(dests, parseDest(inMessage(m, nl.SizeofGenlmsg)[ipvsDest]))
	}
	return dests, nil
}

func parseDest(raw []byte) dest {
	var d dest
	for kind, value := range nested(raw) {
		switch {
		case kind == destWeight && len(value) == 4:
			d.weight = binary.NativeEndian.Uint32(value)
		case (kind == destActive || kind == destInactive) && len(value) == 4:
			d.connections += int(binary.NativeEndian.Uint32(value))
		case kind != destPersist && kind != destStats && kind != destStats64:
			d.attributes = append(d.attributes, nl.NewRtAttr(int(kind), value).Serialize()...)
		}
	}
	return d
}

// quiesce makes the server take no new connections. Those that it has go on: in ip_vs_in_hook only a
// destination that is not available any more ends them, and a weight of 0 does not make it so.
func (d *director) quiesce(s server) error {
	for _, real := range s.dests {
		if real.weight == 0 {
			continue
		}
		weight := nl.NewRtAttr(destWeight, make([]byte, 4)).Serialize()
		all := nl.NewRtAttr(ipvsDest|unix.NLA_F_NESTED, slices.Concat(real.attributes, weight))
		_, err := d.call(ipvsSetDest, unix.NLM_F_ACK, s.attribute(), all)
		if err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("%s: give a real server no new connections: %w", s, err)
		}
	}
	return nil
}

func (d *director) remove(s server) error {
	if _, err := d.call(ipvsDelService, unix.NLM_F_ACK, s.attribute()); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("delete %s: %w", s, err)
	}
	return nil
}
