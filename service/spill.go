package service

import (
	"fmt"
	"slices"
)

// spill is what endpoints of other zones get of the new connections that hints keep in this zone. Their weights are
// multiplied by give, those of this zone by keep, so that they get the share of what has been ejected in this zone:
//
//	           sixteenths       factor     weights
//	this zone  16 16 16  0      keep  4    4 4 4 0
//	others     16 16 16 16      give  1    1 1 1 1    a quarter
type spill struct {
	keep, give uint64 // 0: nothing spills
	zone, lost uint64 // weights in sixteenths: of this zone, and of it what is ejected
	full, all  int    // endpoints of this zone: with their full share, and all ready ones
}

// is reports whether anything spills.
func (p *spill) is() bool { return p.give > 0 }

// spills decides about it. Endpoints that have a small share because they are new do not count: others of the zone take
// more meanwhile.
func (s *selection) spills() (p spill) {
	if len(s.known) == 0 || s.crowded || s.health.Mode != HealthEject || !s.hints.byZone() {
		return p
	}
	var rest, others uint64 // sixteenths of weight: not ejected in this zone, and in the other zones
	for i := range s.candidates {
		c := &s.candidates[i]
		if !c.takes(clusterPool) {
			continue
		}
		weight, lacks := uint64(c.endpoint.Weight), uint64(c.lacks)
		if !slices.Contains(c.endpoint.Hints.Zones, s.hints.zone) {
			others += weight * (fullLevel - lacks)
			continue
		}
		p.zone += weight * fullLevel
		rest += weight * (fullLevel - lacks)
		if p.all++; lacks > 0 && !c.known.fresh {
			p.lost += weight * lacks
		} else {
			p.full++
		}
	}
	keep, lose := proportion(p.zone-p.lost, p.lost)
	there, here := proportion(others, rest)
	p.keep, p.give = proportion(keep*there, lose*here)
	return p
}

// maxFactor bounds the factors of weights. With a weight and its sixteenths they do not overflow.
const maxFactor = 1 << 20

// proportion is that of two numbers, in as small ones as can be; 0 if one of them is.
func proportion(a, b uint64) (x, y uint64) {
	if a == 0 || b == 0 {
		return 0, 0
	}
	for x, y = a, b; y != 0; x, y = y, x%y { // x becomes what divides both
	}
	for a, b = a/x, b/x; max(a, b) > maxFactor; a, b = a/2, b/2 {
	}
	return max(a, 1), max(b, 1)
}

// factor is by what the weight of an endpoint is multiplied.
func (p *spill) factor(c *candidate, zone string) uint64 {
	if c.endpoint.Hints != nil && slices.Contains(c.endpoint.Hints.Zones, zone) {
		return p.keep
	}
	return p.give
}

// text says it for people.
func (p *spill) text(zone string) string {
	return fmt.Sprintf("%d of %d endpoints of zone %s have their full share: %.3g%% of new connections go to other zones",
		p.full, p.all, zone, 100*float64(p.lost)/float64(p.zone))
}
