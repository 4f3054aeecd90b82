package ipvs

import (
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
)

// timeout is one of those that the kernel has for all virtual servers.
type timeout struct {
	attribute uint16
	name      string // for people: the field of the configuration
	wanted    time.Duration
}

// wanted are those that are to be set; the others stay as they are.
func (t Timeouts) wanted() (all []timeout) {
	for _, one := range []timeout{
		{attrTimeoutTCP, "ipvs.tcpTimeout", t.TCP},
		{attrTimeoutFIN, "ipvs.tcpFinTimeout", t.TCPFin},
		{attrTimeoutUDP, "ipvs.udpTimeout", t.UDP},
	} {
		if one.wanted > 0 {
			all = append(all, one)
		}
	}
	return all
}

// request sets it, in whole seconds.
func (t timeout) request(done func()) request {
	return request{command: cmdSetConfig, what: fmt.Sprintf("%s %s", t.name, t.wanted), done: done,
		encode: func(ae *netlink.AttributeEncoder) { ae.Uint32(t.attribute, uint32(t.wanted.Seconds())) }}
}

// setTimeouts comes when everything else is in force: Services do not depend on it. With dataplane.ErrPartial the
// kernel keeps what it has instead of those that the error names.
func (p *Plane) setTimeouts() error {
	p.timeouts = nil
	var requests []request
	for _, t := range p.options.Timeouts.wanted() {
		requests = append(requests, t.request(func() { p.timeouts = append(p.timeouts, t) }))
	}
	refused, err := p.director.perform(requests)
	if err != nil || len(refused) == 0 {
		return err
	}
	return fmt.Errorf("%w: %w: a kernel takes at most 2147483647 ticks, of which it has CONFIG_HZ a second "+
		"(24.8 days where that is 1000, 248 days where it is 100): configure less",
		dataplane.ErrPartial, errors.Join(refused...))
}

// timeoutDrifts are those that somebody has changed since they were set.
func (p *Plane) timeoutDrifts() (drifts []dataplane.Drift, err error) {
	if len(p.timeouts) == 0 {
		return nil, nil
	}
	have, err := p.director.timeouts()
	if err != nil {
		return nil, err
	}
	for _, t := range p.timeouts {
		if want := t.wanted.Truncate(time.Second); have[t.attribute] != want {
			drifts = append(drifts, dataplane.Drift{
				Class: "timeout", Object: t.name, Want: want.String(), Have: have[t.attribute].String(),
			})
		}
	}
	return drifts, nil
}

// timeouts are those of the kernel, by their attributes.
func (d *director) timeouts() (map[uint16]time.Duration, error) {
	const what = "timeouts of IPVS"
	m, err := d.message(request{command: cmdGetConfig, what: what, encode: func(*netlink.AttributeEncoder) {}}, 0)
	if err != nil {
		return nil, err
	}
	if m, err = d.conn.Send(m); err != nil {
		return nil, fmt.Errorf("read %s: %w", what, err)
	}
	buffer := make([]byte, answerSize)
	for { // answers of what was given up may come first
		n, err := d.receive(buffer)
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", what, err)
		}
		answers, err := syscall.ParseNetlinkMessage(buffer[:n])
		if err != nil {
			return nil, fmt.Errorf("parse an answer of %d bytes: %w", n, err)
		}
		for _, a := range answers {
			if a.Header.Seq == m.Header.Sequence {
				return decodeTimeouts(a)
			}
		}
	}
}

func decodeTimeouts(m syscall.NetlinkMessage) (map[uint16]time.Duration, error) {
	if m.Header.Type == unix.NLMSG_ERROR || len(m.Data) < genlHeader {
		return nil, fmt.Errorf("read timeouts of IPVS: %w", errnoOf(m.Data))
	}
	ad, err := netlink.NewAttributeDecoder(m.Data[genlHeader:])
	if err != nil {
		return nil, fmt.Errorf("read timeouts of IPVS: %w", err)
	}
	found := map[uint16]time.Duration{}
	for ad.Next() {
		found[ad.Type()] = time.Duration(ad.Uint32()) * time.Second
	}
	return found, ad.Err()
}
