package ipvs

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/mdlayher/genetlink"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// Commands and attributes of include/uapi/linux/ip_vs.h.
const (
	genlName    = "IPVS"
	genlVersion = 1
	genlHeader  = 4 // bytes

	cmdNewService = 1
	cmdSetService = 2
	cmdDelService = 3
	cmdGetService = 4
	cmdNewDest    = 5
	cmdSetDest    = 6
	cmdDelDest    = 7
	cmdGetDest    = 8
	cmdSetConfig  = 12
	cmdGetConfig  = 13

	attrService    = 1 // of commands
	attrDest       = 2
	attrTimeoutTCP = 4
	attrTimeoutFIN = 5
	attrTimeoutUDP = 6

	serviceFamily    = 1 // of virtual servers
	serviceProtocol  = 2
	serviceAddress   = 3
	servicePort      = 4
	serviceMark      = 5
	serviceScheduler = 6
	serviceFlags     = 7
	serviceTimeout   = 8
	serviceNetmask   = 9

	destAddress  = 1 // of real servers
	destPort     = 2
	destMethod   = 3
	destWeight   = 4
	destUpper    = 5
	destLower    = 6
	destActive   = 7
	destInactive = 8

	masquerade = 0 // IP_VS_CONN_F_MASQ, the forwarding method that translates address and port
	methodMask = 7 // IP_VS_CONN_F_FWD_MASK
)

// serverKey names a virtual server: by what packets are sent to or, if mark is not 0, by their mark.
type serverKey struct {
	addr     netip.Addr
	port     uint16
	protocol model.Protocol
	mark     uint32
	v6       bool
}

func addressKey(k model.Key) serverKey {
	return serverKey{addr: k.Addr, port: k.Port, protocol: k.Protocol, v6: k.Addr.Is6()}
}

func (k serverKey) compare(o serverKey) int {
	return cmp.Or(cmp.Compare(k.mark, o.mark), k.addr.Compare(o.addr), cmp.Compare(k.port, o.port),
		cmp.Compare(k.protocol, o.protocol), model.FalseFirst(k.v6, o.v6))
}

func (k serverKey) String() string {
	switch {
	case k.mark == 0:
		return fmt.Sprintf("%s/%s", netip.AddrPortFrom(k.addr, k.port), k.protocol)
	case k.v6:
		return fmt.Sprintf("fwmark %#x IPv6", k.mark)
	}
	return fmt.Sprintf("fwmark %#x", k.mark)
}

// udp reports whether a virtual server is one of UDP. That of a mark tells by its pool's number, see numbers.
func (k serverKey) udp() bool {
	if k.mark != 0 {
		return k.mark%2 == 0
	}
	return k.protocol == model.UDP
}

func (k serverKey) family() uint16 {
	if k.v6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

func (k serverKey) encode(ae *netlink.AttributeEncoder) {
	ae.Uint16(serviceFamily, k.family())
	if k.mark != 0 {
		ae.Uint32(serviceMark, k.mark)
		return
	}
	ae.Uint16(serviceProtocol, uint16(k.protocol))
	ae.Bytes(serviceAddress, k.addr.AsSlice())
	ae.Bytes(servicePort, binary.BigEndian.AppendUint16(nil, k.port))
}

// identify encodes what names a virtual server in a request about its real servers.
func (k serverKey) identify(ae *netlink.AttributeEncoder) {
	ae.Nested(attrService, func(ae *netlink.AttributeEncoder) error {
		k.encode(ae)
		return nil
	})
}

// A request is one thing to do to IPVS. The kernel answers each by itself, so that one that it refuses
// does not keep the others out.
type request struct {
	command uint8
	what    string // for people: the object
	encode  func(ae *netlink.AttributeEncoder)
	done    func() // what the plane remembers when it has been done
	// server is the virtual server that this is, or is part of; lacks says what the kernel has not if it
	// answers ENOENT.
	server    serverKey
	lacks     string
	scheduler string // of a virtual server that is made or changed
}

func newServer(k serverKey, scheduler string, done func()) request {
	return serverRequest(cmdNewService, k, scheduler, done)
}

func setServer(k serverKey, scheduler string, done func()) request {
	return serverRequest(cmdSetService, k, scheduler, done)
}

func serverRequest(command uint8, k serverKey, scheduler string, done func()) request {
	encode := func(ae *netlink.AttributeEncoder) {
		ae.Nested(attrService, func(ae *netlink.AttributeEncoder) error {
			k.encode(ae)
			ae.String(serviceScheduler, scheduler)
			ae.Bytes(serviceFlags, flagBytes(flagsOf(scheduler)))
			ae.Uint32(serviceTimeout, 0)
			ae.Uint32(serviceNetmask, k.netmask())
			return nil
		})
	}
	lacks := fmt.Sprintf("this kernel has no scheduler %s: load module ip_vs_%[1]s, or choose another", scheduler)
	what := "virtual server " + k.String()
	return request{command: command, what: what, encode: encode, done: done, server: k, lacks: lacks, scheduler: scheduler}
}

// flagsOf has schedulers that hash choose another real server where the one that they find takes no
// connections; otherwise they would refuse its clients (IP_VS_SVC_F_SCHED_SH_FALLBACK, …MH_FALLBACK).
func flagsOf(scheduler string) uint32 {
	const fallback = 8
	if scheduler == "sh" || scheduler == "mh" {
		return fallback
	}
	return 0
}

// flagBytes sets exactly these flags of a virtual server (struct ip_vs_flags).
func flagBytes(flags uint32) []byte {
	b := binary.NativeEndian.AppendUint32(nil, flags)
	return binary.NativeEndian.AppendUint32(b, ^uint32(0))
}

// netmask makes persistence, if there is any, remember single addresses.
func (k serverKey) netmask() uint32 {
	if k.v6 {
		return 128
	}
	return ^uint32(0)
}

func deleteServer(k serverKey, done func()) request {
	return request{command: cmdDelService, what: "virtual server " + k.String(), encode: k.identify, done: done, server: k}
}

func realRequest(command uint8, k serverKey, r real, done func()) request {
	what := fmt.Sprintf("real server %s of %s", r.addr, k)
	return request{command: command, what: what, server: k, done: done, encode: func(ae *netlink.AttributeEncoder) {
		k.identify(ae)
		ae.Nested(attrDest, func(ae *netlink.AttributeEncoder) error {
			ae.Bytes(destAddress, r.addr.Addr().AsSlice())
			ae.Bytes(destPort, binary.BigEndian.AppendUint16(nil, r.addr.Port()))
			ae.Uint32(destMethod, masquerade)
			ae.Uint32(destWeight, r.weight)
			ae.Uint32(destUpper, 0)
			ae.Uint32(destLower, 0)
			return nil
		})
	}}
}

// director is the IPVS of the network namespace of the thread that opened it.
type director struct {
	conn   *netlink.Conn
	family uint16 // generic netlink's number of IPVS
	fault  func(operation string) error
	buffer []byte // for lists
	// counter is the socket of count, made is how many of what it counts are there by our doing: it may be less than 0.
	counter, made int
	places        places
	*lacking
}

// places are where the kernel lists virtual servers, from 1, by the last list of most of them. In that order it deletes
// all (ipvsadm -C), and keeps their real servers for some minutes, the last one first. Who makes a real server again
// has it search through all that are kept (ip_vs_trash_get_dest in net/netfilter/ipvs/ip_vs_ctl.c), and takes it out:
// in the reverse order the first one is the one.
type places map[serverKey]int

// note takes in a list.
func (p *places) note(list []serverKey) {
	if 2*len(list) < len(*p) {
		return
	}
	*p = make(places, len(list))
	for i, key := range list {
		(*p)[key] = i + 1
	}
}

// compare orders virtual servers that are to be made.
func (p places) compare(a, b serverKey) int { return cmp.Or(cmp.Compare(p[b], p[a]), a.compare(b)) }

// backwards orders virtual servers that all go: the reverse of the order in which a process that has no list yet makes
// them.
func backwards(a, b serverKey) int { return b.compare(a) }

func deletions(keys []serverKey) (requests []request) {
	for _, key := range keys {
		requests = append(requests, deleteServer(key, func() {}))
	}
	return requests
}

func openDirector(fault func(string) error) (*director, error) {
	conn, err := netlink.Dial(unix.NETLINK_GENERIC, nil)
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	family, err := genetlink.NewConn(conn).GetFamily(genlName) // which loads the module, since Linux 5.6
	if err != nil {
		_ = conn.Close() // the error before is the one that tells
	}
	if errors.Is(err, unix.ENOENT) {
		return nil, fmt.Errorf("%w: it has no IPVS (module ip_vs, CONFIG_IP_VS)", dataplane.ErrUnsupported)
	}
	if err != nil {
		return nil, fmt.Errorf("find IPVS: %w", err)
	}
	counter, err := openCounter()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open socket: %w", err), conn.Close())
	}
	return &director{conn: conn, family: family.ID, fault: fault, counter: counter, lacking: newLacking()}, nil
}

func (d *director) close() error {
	if d.conn == nil {
		return nil
	}
	conn := d.conn
	d.conn = nil
	return errors.Join(conn.Close(), unix.Close(d.counter))
}

func (d *director) message(r request, flags netlink.HeaderFlags) (netlink.Message, error) {
	ae := netlink.NewAttributeEncoder()
	r.encode(ae)
	attributes, err := ae.Encode()
	if err != nil {
		return netlink.Message{}, fmt.Errorf("encode %s: %w", r.what, err)
	}
	return netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(d.family), Flags: netlink.Request | flags},
		Data:   append([]byte{r.command, genlVersion, 0, 0}, attributes...),
	}, nil
}

// batchSize is how many requests go to the kernel at once: their answers must fit into the socket.
const batchSize = 128

// perform does the requests in their order and returns an error for each that the kernel refuses. The
// second error is one after which it is not known what has been done.
func (d *director) perform(requests []request) (refused []error, err error) {
	absent := map[serverKey]bool{}
	for len(requests) > 0 {
		n := min(len(requests), batchSize)
		more, err := d.send(requests[:n], absent)
		refused = append(refused, more...)
		if err != nil {
			return refused, err
		}
		requests = requests[n:]
	}
	return refused, nil
}

// send does at most batchSize requests. Virtual servers that the kernel refuses are absent; that it then refuses
// their real servers as well is not worth an error each.
func (d *director) send(requests []request, absent map[serverKey]bool) (refused []error, err error) {
	if err := d.fault("ipvs send"); err != nil {
		return nil, err
	}
	errnos, err := d.ask(requests)
	if err != nil {
		return nil, err
	}
	for i, r := range requests {
		switch err := errnos[i]; {
		case err == 0:
			d.account(r)
			r.done()
		case err == unix.EPERM:
			return refused, r.refusal(err)
		case err == unix.ESRCH && absent[r.server]:
		case err == unix.ENOENT && d.lacking.refused(r):
			absent[r.server] = absent[r.server] || r.command == cmdNewService
		default:
			refused = append(refused, r.refusal(err))
			absent[r.server] = absent[r.server] || r.command == cmdNewService
		}
	}
	return refused, nil
}

// account notes that a request has been done.
func (d *director) account(r request) {
	n := 0
	switch r.command {
	case cmdNewService:
		n = 1
	case cmdDelService:
		n = -1
		delete(d.places, r.server)
	}
	if !r.server.v6 { // as count has it
		d.made += n
	}
}

// ask sends requests to the kernel and returns its answer to each, 0 for those it has done. Only the last asks to be
// acknowledged: errors are answered unasked, and requests are taken in their order. Reading an acknowledgement of
// each took half of the time of a first Sync.
func (d *director) ask(requests []request) (answers []unix.Errno, err error) {
	messages := make([]netlink.Message, len(requests))
	for i, r := range requests {
		if messages[i], err = d.message(r, 0); err != nil {
			return nil, err
		}
	}
	messages[len(messages)-1].Header.Flags |= netlink.Acknowledge
	if messages, err = d.conn.SendMessages(messages); err != nil {
		return nil, err
	}
	found, err := d.answers(messages[len(messages)-1].Header.Sequence)
	if err != nil {
		return nil, fmt.Errorf("tell IPVS of %s and %d more: %w", requests[0].what, len(requests)-1, err)
	}
	for _, m := range messages {
		answers = append(answers, found[m.Header.Sequence])
	}
	return answers, nil
}

// refusal says what the kernel does not do, and why.
func (r request) refusal(err unix.Errno) error {
	if r.lacks != "" && err == unix.ENOENT {
		return fmt.Errorf("IPVS refuses %s: %w: %s", r.what, err, r.lacks)
	}
	return fmt.Errorf("IPVS refuses %s: %w", r.what, err)
}

// listed is a virtual server as the kernel lists it, without its real servers.
type listed struct {
	scheduler string
	flags     uint32
}

// servers are all virtual servers in the namespace, whoever made them. Between two parts of a list that the kernel
// hands out the places change of those in the next ones, if others are made or deleted, before Linux 7 in whatever
// namespace, or, since then, a table is made larger that is too small for them: some are then listed twice, or not at
// all. So there is another list, as often as listTries says, if this one has not as many of IPv4 as there are.
func (d *director) servers() (found map[serverKey]listed, err error) {
	for range listTries {
		before, err := d.count()
		if err != nil {
			return nil, err
		}
		listed, order, err := d.list()
		if err != nil {
			return nil, err
		}
		after, err := d.count()
		if err != nil {
			return nil, err
		}
		d.places.note(order)
		if found = listed; before == after && len(found) == len(order) && ofIPv4(found) == after {
			break
		}
	}
	return found, nil
}

// list is servers, once, and in which order the kernel has them.
func (d *director) list() (found map[serverKey]listed, order []serverKey, err error) {
	found = map[serverKey]listed{}
	all := request{command: cmdGetService, what: "virtual servers", encode: func(*netlink.AttributeEncoder) {}}
	err = d.dump(all, attrService, func(ad *netlink.AttributeDecoder) error {
		key, s := decodeServer(ad)
		found[key], order = s, append(order, key)
		return ad.Err()
	})
	return found, order, err
}

func ofIPv4(servers map[serverKey]listed) (n int) {
	for key := range servers {
		if !key.v6 {
			n++
		}
	}
	return n
}

func decodeServer(ad *netlink.AttributeDecoder) (key serverKey, s listed) {
	const hashed = 2 // IP_VS_SVC_F_HASHED, which says nothing
	var address []byte
	for ad.Next() {
		switch ad.Type() {
		case serviceFamily:
			key.v6 = ad.Uint16() == unix.AF_INET6
		case serviceProtocol:
			key.protocol = model.Protocol(ad.Uint16())
		case serviceAddress:
			address = ad.Bytes()
		case servicePort:
			key.port = bigEndian16(ad.Bytes())
		case serviceMark:
			key.mark = ad.Uint32()
		case serviceScheduler:
			s.scheduler = ad.String()
		case serviceFlags:
			if b := ad.Bytes(); len(b) >= 4 {
				s.flags = binary.NativeEndian.Uint32(b) &^ hashed
			}
		}
	}
	if key.mark != 0 {
		return serverKey{mark: key.mark, v6: key.v6}, s
	}
	key.addr = decodeAddress(address, key.v6)
	return key, s
}

func bigEndian16(b []byte) uint16 {
	if len(b) != 2 {
		return 0
	}
	return binary.BigEndian.Uint16(b)
}

// decodeAddress takes the part of a union nf_inet_addr that an address family uses.
func decodeAddress(b []byte, v6 bool) netip.Addr {
	if !v6 && len(b) > 4 {
		b = b[:4]
	}
	addr, _ := netip.AddrFromSlice(b)
	return addr
}

// real is a real server as the kernel lists it.
type real struct {
	addr        netip.AddrPort
	weight      uint32
	method      uint32
	connections uint32
}

// reals are the real servers of a virtual server.
func (d *director) reals(k serverKey) (found []real, err error) {
	of := request{command: cmdGetDest, what: "real servers of " + k.String(), encode: k.identify}
	err = d.dump(of, attrDest, func(ad *netlink.AttributeDecoder) error {
		found = append(found, decodeReal(ad, k.v6))
		return ad.Err()
	})
	if errors.Is(err, unix.ESRCH) { // the virtual server went meanwhile
		return nil, nil
	}
	return found, err
}

func decodeReal(ad *netlink.AttributeDecoder, v6 bool) (r real) {
	var address []byte
	var port uint16
	for ad.Next() {
		switch ad.Type() {
		case destAddress:
			address = ad.Bytes()
		case destPort:
			port = bigEndian16(ad.Bytes())
		case destMethod:
			r.method = ad.Uint32() & methodMask
		case destWeight:
			r.weight = ad.Uint32()
		case destActive, destInactive:
			r.connections += ad.Uint32()
		}
	}
	r.addr = netip.AddrPortFrom(decodeAddress(address, v6), port)
	return r
}
