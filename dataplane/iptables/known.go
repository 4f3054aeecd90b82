package iptables

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"fairlead.dev/fairlead/model"
)

// With affinity, a pool of few backends asks the ipset of each for the client. One of many has groups, each with
// an ipset for the clients of all backends in it, and larger groups of these:
//
//	KUBE-PODS-… ─ in the set of group 3? ─► KUBE-KNOWN-…3 ─ of 3a? ─► KUBE-KNOWN-…3a ─ of a backend? ─► KUBE-STICK-…
//
// The backends' sets are what counts: a client that only a group knows is none, and a packet that a group leads nowhere
// returns. The groups of a backend depend on its address alone: others come and go without moving its clients. Only the
// number of levels of groups depends on the others. When a pool grows by a factor of sixteen a level is added, whose
// sets learn from those of the backends.

// fanGroups is how many groups there are in a larger one. An unknown client is looked for in so many sets.
const fanGroups = 16

// levelsOf is how many levels of groups so many backends have: in the smallest are maxRow, more or less.
func levelsOf(backends int) (levels int) {
	for ; backends > maxRow && levels < maxLevels; backends /= fanGroups {
		levels++
	}
	return levels
}

// path are the groups of a backend, a digit for each level.
func (c *chooser) path(b model.Backend) string {
	sum := sha256.Sum256([]byte(c.id + " " + b.AddrPort().String()))
	return hex.EncodeToString(sum[:])[:c.levels]
}

// groupSet is the ipset that remembers the clients of all backends of a group. Sets are not by address family.
func (c *chooser) groupSet(path string, v6 bool) string {
	return setPrefix + hashed(fmt.Sprint(c.id, " ", v6, " group ", path))
}

// find are the rules that send a client to the backend that remembers it. They are passed by other clients.
func (c *chooser) find(backends []model.Backend, path string) []rule {
	var rules []rule
	if len(path) == c.levels {
		for _, b := range backends {
			rules = append(rules, rule{set: c.setName(b), do: goes(c.affinityChain(b))})
		}
		return rules
	}
	groups := map[string][]model.Backend{}
	for _, b := range backends {
		below := c.path(b)[:len(path)+1]
		groups[below] = append(groups[below], b)
	}
	for _, below := range slices.Sorted(maps.Keys(groups)) {
		group := groups[below]
		name := kindKnown + c.id[:12] + below
		c.make(name, c.find(group, below))
		rules = append(rules, rule{set: c.groupSet(below, group[0].Addr.Is6()), do: jumpTo(name)})
	}
	return rules
}

// affinityChain is the chain of a backend that remembers its clients. The groups come after the backend, because they
// must not forget sooner.
func (c *chooser) affinityChain(b model.Backend) string {
	put := func(set string) rule { return rule{do: target{verb: remember, name: set, expire: c.affinity}} }
	rules := []rule{put(c.setName(b))}
	path := c.path(b)
	for i := range path {
		rules = append(rules, put(c.groupSet(path[:i+1], b.Addr.Is6())))
	}
	name := c.affinityName(b)
	c.make(name, append(rules, c.translate(b)))
	return name
}

// setUse is an ipset for the clients of a backend, or of those whose sets are its members.
type setUse struct {
	expire  time.Duration
	pool    model.PoolID
	backend netip.AddrPort
	members []string
	most    uint32 // clients that are remembered
}

func (u setUse) group() bool { return u.members != nil }

func (u setUse) String() string {
	if u.group() {
		return fmt.Sprintf("clients of %s at %d of its backends", poolName(u.pool), len(u.members))
	}
	return fmt.Sprintf("clients of %s at %s", poolName(u.pool), u.backend)
}

// addSets adds the ipsets of a pool to those that are needed.
func (c *chooser) addSets(needed map[string]setUse, pool model.PoolID, backends []model.Backend) {
	most := max(maxClients/max(len(backends), 1), leastClients)
	for _, b := range backends {
		set := c.setName(b)
		needed[set] = setUse{expire: c.affinity, pool: pool, backend: b.AddrPort(), most: uint32(most)}
		path := c.path(b)
		for i := range path {
			name := c.groupSet(path[:i+1], b.Addr.Is6())
			g := needed[name]
			needed[name] = setUse{expire: c.affinity, pool: pool, members: append(g.members, set), most: g.most + uint32(most)}
		}
	}
}
