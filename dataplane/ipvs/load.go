package ipvs

import (
	"fmt"

	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/nft"
)

// load reads what the kernel holds in our table. A table whose sets or base chains differ from ours,
// because another version made them, is not taken over but for its records: t.Foreign is true.
func (p *Plane) load(t *table) error {
	if err := p.config.Inject("nftables list"); err != nil {
		return err
	}
	if err := t.Load(p.ruleset.Socket, t.constantChains()); err != nil || !t.Exists {
		return err
	}
	for i, s := range t.Sets {
		if t.Foreign || !t.FoundSets[s.Name] {
			continue
		}
		if err := t.Find(p.ruleset.Socket, i); err != nil {
			return fmt.Errorf("list %s: set %s: %w", t, s.Name, err)
		}
	}
	if t.Foreign {
		return t.loadRecords(p.ruleset.Socket)
	}
	for key, chain := range t.Found(classes) {
		id := nft.Token(nft.Number([]byte(key))).Class()
		t.foundIDs[chain], t.takenIDs[id] = id, true
	}
	return nil
}

// loadRecords reads which virtual servers the table says are ours, whatever else it holds.
func (t *table) loadRecords(c *nfnetlink.Socket) error {
	t.previous = map[string]bool{}
	if !t.FoundSets[t.Sets[virtualServers].Name] {
		return nil
	}
	reset := func() { clear(t.previous) }
	return t.List(c, virtualServers, reset, func(e nft.Element) { t.previous[string(e.Key)] = true })
}
