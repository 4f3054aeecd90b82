package ebpf

import (
	"fmt"
	"maps"
)

// book adds what a translation that is removed, of a flow, has counted since the programs last did.
func (s *sweep) book(flow *packetsTranslation, way packetsDirection, t *packetsTranslation) {
	if t.Packets == 0 {
		return
	}
	key := packetsTrafficKey{Pool: flow.Pool, Backend: flow.Dst}
	sum, known := s.rest[key]
	if !known && len(s.rest) >= trafficked { // the programs have counted the most of it
		return
	}
	sum.Packets[way] += uint64(t.Packets)
	sum.Bytes[way] += uint64(t.Bytes)
	s.rest[key] = sum
}

// traffic is what has passed between clients and backends, by the names of pools, since the tables were made. Of flows
// that another process removes, it may lack the last second.
func (p *Plane) traffic() (map[packetsTrafficKey]packetsTraffic, error) {
	out := map[packetsTrafficKey]packetsTraffic{}
	if s := p.sweep; s != nil {
		s.mu.Lock()
		maps.Copy(out, s.rest)
		s.mu.Unlock()
	}
	m := p.memory[packetsMapTraffic]
	if m == nil {
		return out, nil
	}
	err := each(m, func(key packetsTrafficKey, more packetsTraffic) error {
		sum := out[key]
		for way := range sum.Packets {
			sum.Packets[way] += more.Packets[way]
			sum.Bytes[way] += more.Bytes[way]
		}
		out[key] = sum
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read traffic: %w", err)
	}
	return out, nil
}
