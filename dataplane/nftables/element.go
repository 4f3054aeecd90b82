package nftables

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"

	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// row names the row of which an element is a part.
func (t *table) row(s *nft.Set, e nft.Element) (row, want string) {
	name, _, _ := strings.Cut(s.Name, "-")
	switch name {
	case "slots", "choices":
		if len(e.Key) < 8 {
			return "", ""
		}
		want := "in " + s.Name
		if backend, ok := nft.DecodeBackend(e.Data); ok && name == "slots" {
			want = "backend " + backend.String()
		}
		number, index := binary.NativeEndian.Uint32(e.Key), binary.NativeEndian.Uint32(e.Key[4:])
		return fmt.Sprintf("pool %s %s %d", t.poolName(number), strings.TrimSuffix(name, "s"), index), want
	case "backends":
		b, _ := nft.DecodeBackend(e.Data)
		return fmt.Sprintf("name of a backend that clients keep %x", e.Key), b.String()
	case "served":
		return "counter of pool " + t.poolName(nft.Number(e.Key)), "in served"
	case "hairpin":
		a, _ := netip.AddrFromSlice(e.Key[:min(len(e.Key), int(t.Family.Address.Words()*4))])
		return fmt.Sprintf("backend %s that reaches itself", a), "in " + s.Name
	}
	return "", ""
}

// poolName is the pool's name, or its number if no pool has that number.
func (t *table) poolName(number uint32) string {
	if id, ok := t.poolNames()[number]; ok {
		return id.String()
	}
	return fmt.Sprintf("number %d", number)
}

func (t *table) poolNames() map[uint32]model.PoolID {
	if t.byName == nil {
		t.byName = make(map[uint32]model.PoolID, len(t.pools))
		for id, p := range t.pools {
			t.byName[p.number] = id
		}
	}
	return t.byName
}
