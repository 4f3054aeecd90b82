package iptables

import (
	"crypto/sha256"
	"encoding/base32"
	"encoding/binary"
	"math/bits"
	"slices"
	"strconv"
	"strings"
	"time"

	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/model"
)

// certain is the chance that xt_statistic takes for one: it compares with 31 random bits.
const certain = 1 << 31

const (
	neighbours = 4 // addresses that go to the same chain
	uneven     = 4 // how many times as large as it should be a part may be

	maxRow = 12 // backends of a chain that are tried one after the other
	digits = 36 // each names one of the chains among which one chooses
	fanOut = 8  // chains among which a chain with more of them chooses; of very many backends, more
	// maxLevels is how many chains, one leading to the next, there are between a pool's first one and a backend's.
	maxLevels = 3
)

// chooser makes the chains that choose a backend of a pool.
type chooser struct {
	id       string // of the pool and protocol, in the names of chains and sets
	protocol model.Protocol
	affinity time.Duration
	levels   int // of groups by which clients are found
	fan      int // chains among which a chain of many backends chooses
	edit     func(chain string, rules []rule)
	chains   []string // made below the first one
}

// hashed is what kube-proxy puts behind the kind of a chain: letters and digits that stand for a name.
func hashed(name string) string {
	sum := sha256.Sum256([]byte(name))
	return base32.StdEncoding.EncodeToString(sum[:])[:16]
}

// setName is the ipset that remembers the clients of a backend.
func (c *chooser) setName(b model.Backend) string {
	return setPrefix + hashed(c.id+" "+b.AddrPort().String())
}

// newChooser is for a pool's backends, which are those that it serves.
func newChooser(id string, pool model.Pool, backends int) *chooser {
	c := &chooser{id: id, affinity: pool.Affinity, fan: fanFor(backends)}
	if c.affinity > 0 {
		c.levels = levelsOf(backends)
	}
	return c
}

// fanFor is among how many chains so many backends are divided, again and again, with maxLevels at most.
func fanFor(backends int) (fan int) {
	for fan = fanOut; maxRow*fan*fan*fan < backends && fan < digits; {
		fan = min(fan+fan/2, digits)
	}
	return fan
}

// choice are the rules that choose, and make the chains below them.
func (c *chooser) choice(backends []model.Backend) []rule {
	var rules []rule
	if c.affinity > 0 {
		rules = c.find(backends, "")
	}
	return append(rules, c.split(locate(backends), "")...)
}

// placed is a backend, and its part at each level. These depend on its address alone, so that others come and go
// without changing more chains than those that lead to them. Neighbours share them: the endpoints of a node are mostly
// neighbours.
type placed struct {
	model.Backend
	parts [maxLevels]byte
}

// locate finds the parts of backends.
func locate(backends []model.Backend) []placed {
	all := make([]placed, 0, len(backends))
	for _, b := range backends {
		a := b.Addr.As16()
		a[len(a)-1] &^= neighbours - 1
		sum := sha256.Sum256(binary.BigEndian.AppendUint16(a[:], b.Port))
		all = append(all, placed{b, [maxLevels]byte(sum[:])})
	}
	return all
}

func (c *chooser) make(name string, rules []rule) {
	c.chains = append(c.chains, name)
	c.edit(name, rules)
}

func (c *chooser) translate(b model.Backend) rule {
	return rule{protocol: c.protocol, do: target{verb: dnat, to: b.AddrPort()}}
}

// split is a chain's rules for some of the backends: to each of few, or to chains for a part of many.
//
// A rule that matches at random sees only those packets that the rules before it have left. So the first of three equal
// backends takes a third of the packets, and the second one half of the rest. The last one has no condition and takes
// all that is left: a third each. With weights, each takes its weight of the sum of those that are left.
//
// The last of many backends would wait for many rules. So thirteen or more are divided among eight chains, chosen in
// the same way, each with the sum of its weights. A chain with too many is divided again. More than 6,144 backends are
// divided among more chains, as the kernel takes no long way from one to the next. There a chain may have some more.
func (c *chooser) split(backends []placed, path string) []rule {
	parts := make([][]placed, 0, max(maxRow, c.fan))
	if row := len(backends) <= maxRow || len(path) == maxLevels; row {
		for i := range backends {
			parts = append(parts, backends[i:i+1])
		}
	} else {
		parts = c.divided(backends, len(path))
	}
	left := total(backends)
	rules := make([]rule, 0, len(parts))
	for i, part := range parts {
		var r rule
		switch {
		case len(part) == 0:
			continue
		case len(part) > 1:
			below := path + strconv.FormatInt(int64(i), digits)
			name := "KUBE-PART-" + c.id[:12] + below
			c.make(name, c.split(part, below))
			r = rule{do: goes(name)}
		case c.affinity > 0:
			r = rule{do: goes(c.affinityName(part[0].Backend))}
		default:
			r = c.translate(part[0].Backend)
		}
		weight := total(part)
		if weight < left {
			r.chance = chance(weight, left)
			if len(part) == 1 && defect.Is(defect.IPTablesWeight) {
				r.chance = chance(1, uint64(len(backends)-i))
			}
		}
		left -= weight
		rules = append(rules, r)
	}
	return rules
}

// divided are the parts of backends at a level. Where their addresses were chosen so that they would go to few chains,
// they are divided by their order.
func (c *chooser) divided(backends []placed, level int) [][]placed {
	parts := make([][]placed, c.fan)
	for _, b := range backends {
		at := &parts[int(b.parts[level])%c.fan]
		*at = append(*at, b)
	}
	most := uneven * maxRow
	for range maxLevels - 1 - level {
		most *= c.fan
	}
	if slices.ContainsFunc(parts, func(part []placed) bool { return len(part) > most }) {
		for i := range parts {
			parts[i] = backends[len(backends)*i/c.fan : len(backends)*(i+1)/c.fan]
		}
	}
	return parts
}

func (c *chooser) affinityName(b model.Backend) string {
	return kindAffinity + hashed(c.id+" "+b.AddrPort().String())
}

func total(backends []placed) (sum uint64) {
	for _, b := range backends {
		sum += uint64(b.Weight)
	}
	return sum
}

// chance is part of whole in units of 1<<31, rounded. The product may have more than 64 bits: thousands of backends may
// have large weights.
func chance(part, whole uint64) uint32 {
	hi, lo := bits.Mul64(part, certain)
	lo, carry := bits.Add64(lo, whole/2, 0)
	n, _ := bits.Div64(hi+carry, lo, whole)
	return uint32(n)
}

// poolName is the pool in names and comments.
func poolName(id model.PoolID) string {
	words := []string{id.Service}
	if id.Local {
		words = append(words, "local")
	}
	return strings.Join(words, " ")
}
