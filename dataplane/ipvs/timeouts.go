package ipvs

import (
	"errors"
	"fmt"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/ipvs"
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
		{ipvs.TimeoutTCP, "ipvs.tcpTimeout", t.TCP},
		{ipvs.TimeoutFIN, "ipvs.tcpFinTimeout", t.TCPFin},
		{ipvs.TimeoutUDP, "ipvs.udpTimeout", t.UDP},
	} {
		if one.wanted > 0 {
			all = append(all, one)
		}
	}
	return all
}

// request sets it, in whole seconds.
func (t timeout) request(done func()) ipvs.Request {
	return ipvs.SetTimeout(t.attribute, uint32(t.wanted.Seconds()), fmt.Sprintf("%s %s", t.name, t.wanted), done)
}

// setTimeouts comes when everything else is in force: Services do not depend on it. With dataplane.ErrPartial the
// kernel keeps what it has instead of those that the error names.
func (p *Plane) setTimeouts() error {
	p.timeouts = nil
	var requests []ipvs.Request
	for _, t := range p.options.Timeouts.wanted() {
		requests = append(requests, t.request(func() { p.timeouts = append(p.timeouts, t) }))
	}
	refused, err := p.client.perform(requests)
	if err != nil || len(refused) == 0 {
		return err
	}
	return fmt.Errorf("%w: %w: a kernel takes at most 2147483647 ticks (24.8 days with CONFIG_HZ=1000, "+
		"248 days with 100); configure less",
		dataplane.ErrPartial, errors.Join(refused...))
}

// timeoutDrifts are those that another program has changed since they were set.
func (p *Plane) timeoutDrifts() (drifts []dataplane.Drift, err error) {
	if len(p.timeouts) == 0 {
		return nil, nil
	}
	have, err := p.client.Timeouts()
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
