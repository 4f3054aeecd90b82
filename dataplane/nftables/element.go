package nftables

import (
	"encoding/binary"
	"fmt"

	"fairlead.dev/fairlead/dataplane/internal/nf"
	"fairlead.dev/fairlead/model"
)

// describe names an element within its set, where its key does not say enough.
func (t *table) describe(s *nf.Set, e nf.Element) string {
	switch s.Name {
	case "frontends", "internal-frontends":
		key, _ := nf.DecodeKey(e.Key, model.Any)
		return fmt.Sprintf("%s/%s", key.AddrPort(), key.Protocol)
	case "slots", "choices":
		return t.describeSlot(e)
	case "backends":
		b, _ := nf.DecodeBackend(e.Data)
		return fmt.Sprintf("%x %s", e.Key, b)
	case "classes":
		return fmt.Sprintf("%d %s", nf.Token(nf.Number(e.Key)).Class(), e.Chain)
	}
	return ""
}

func (t *table) describeSlot(e nf.Element) string {
	if len(e.Key) < 8 {
		return "?"
	}
	number := binary.NativeEndian.Uint32(e.Key)
	name := fmt.Sprintf("of pool number %d", number)
	if id, ok := t.poolNames()[number]; ok {
		name = "of pool " + id.String()
	}
	name = fmt.Sprintf("%d %s", binary.NativeEndian.Uint32(e.Key[4:]), name)
	if backend, ok := nf.DecodeBackend(e.Data); ok {
		name += ": " + backend.String()
	}
	return name
}

func (t *table) poolNames() map[uint32]model.PoolID {
	if t.names == nil {
		t.names = make(map[uint32]model.PoolID, len(t.pools))
		for id, p := range t.pools {
			t.names[p.number] = id
		}
	}
	return t.names
}
