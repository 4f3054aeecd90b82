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
	sum := s.rest[key]
	sum.Packets[way] += uint64(t.Packets)
	sum.Bytes[way] += uint64(t.Bytes)
	s.rest[key] = sum
}

// traffic is what has passed between clients and backends, by the names of pools, since the tables were made. Of flows
// that another process removes, it may lack the last second.
func (s *sweep) traffic() (map[packetsTrafficKey]packetsTraffic, error) {
	s.mu.Lock()
	out := maps.Clone(s.rest)
	s.mu.Unlock()
	err := each(s.maps[packetsMapTraffic], func(key packetsTrafficKey, more packetsTraffic) error {
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
