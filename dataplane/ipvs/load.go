package ipvs

import (
	"fmt"

	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/nft"
)

// load reads what the kernel holds in our table. A table whose sets or base chains differ from ours,
// because another version made them, is not taken over: t.Foreign is true.
func (p *Plane) load(t *table) error {
	if err := p.config.Inject("nftables list"); err != nil {
		return err
	}
	if err := t.Load(p.conn, t.constantChains()); err != nil || !t.Exists || t.Foreign {
		return err
	}
	for i, s := range t.Sets {
		if !t.FoundSets[s.Name] {
			continue
		}
		if err := t.loadSet(p.conn, i); err != nil {
			return fmt.Errorf("list %s: set %s: %w", t, s.Name, err)
		}
	}
	for key, e := range t.elements[classes] {
		id := nft.Token(nft.Number([]byte(key))).Class()
		t.foundIDs[e.data], t.takenIDs[id] = id, true
	}
	return nil
}

func (t *table) loadSet(c *nfnetlink.Socket, i int) error {
	return t.Members(c, i, func() { clear(t.elements[i]) }, func(key string, e nft.Element) {
		data := string(e.Data)
		if t.Sets[i].Verdicts() {
			data = e.Chain
		}
		t.elements[i][key] = &element{data: data}
	})
}

// records are the keys of the virtual servers that the table says are ours, whatever else it holds.
func (t *table) records(c *nfnetlink.Socket) (map[string]bool, error) {
	found := map[string]bool{}
	if !t.FoundSets[t.Sets[virtualServers].Name] {
		return found, nil
	}
	reset := func() { clear(found) }
	return found, t.List(c, virtualServers, reset, func(e nft.Element) { found[string(e.Key)] = true })
}
