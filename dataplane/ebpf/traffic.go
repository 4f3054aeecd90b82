package ebpf

import (
	"errors"
	"fmt"
	"maps"

	"github.com/cilium/ebpf"
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

// traffic is what has passed between clients and backends, by the names of pools, since the tables were made; of flows
// that are removed by others than this process all but their last second.
func (s *sweep) traffic() (map[packetsTrafficKey]packetsTraffic, error) {
	s.mu.Lock()
	out := maps.Clone(s.rest)
	s.mu.Unlock()
	keys, values := make([]packetsTrafficKey, batch), make([]packetsTraffic, batch)
	for cursor := (ebpf.MapBatchCursor{}); ; {
		n, err := s.maps[packetsMapTraffic].BatchLookup(&cursor, keys, values, nil)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil, fmt.Errorf("read traffic: %w", err)
		}
		for i, key := range keys[:n] {
			sum := out[key]
			for way := range sum.Packets {
				sum.Packets[way] += values[i].Packets[way]
				sum.Bytes[way] += values[i].Bytes[way]
			}
			out[key] = sum
		}
		if err != nil {
			return out, nil
		}
	}
}
