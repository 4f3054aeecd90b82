package iptables

import (
	"crypto/sha256"
	"encoding/base32"
	"math/bits"
	"strconv"
	"strings"
	"time"

	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/model"
)

// certain is the chance that xt_statistic takes for one: it compares with 31 random bits.
const certain = 1 << 31

const (
	maxRow = 12 // backends of a chain that are tried one after the other
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
	for fan = fanOut; maxRow*fan*fan*fan < backends; {
		fan++
	}
	return fan
}

// choice are the rules that choose, and make the chains below them.
func (c *chooser) choice(backends []model.Backend) []rule {
	var rules []rule
	if c.affinity > 0 {
		rules = c.find(backends, "")
	}
	return append(rules, c.split(backends, "")...)
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
// The last of many backends would wait for many rules. So thirteen or more are divided among up to eight chains, chosen
// in the same way, each with the sum of its weights. A chain with too many is divided again. More than 6,144 backends
// are divided among more chains, as the kernel takes no long way from one to the next.
func (c *chooser) split(backends []model.Backend, path string) []rule {
	left := total(backends)
	rules := make([]rule, 0, min(len(backends), max(maxRow, c.fan)))
	if len(backends) <= maxRow {
		for i, b := range backends {
			r := c.translate(b)
			if c.affinity > 0 {
				r = rule{do: goes(c.affinityName(b))}
			}
			if i < len(backends)-1 {
				r.chance = chance(uint64(b.Weight), left)
				if defect.Is(defect.IPTablesWeight) {
					r.chance = chance(1, uint64(len(backends)-i))
				}
			}
			left -= uint64(b.Weight)
			rules = append(rules, r)
		}
		return rules
	}
	parts := min(c.fan, (len(backends)+maxRow-1)/maxRow)
	for i := range parts {
		from, to := len(backends)*i/parts, len(backends)*(i+1)/parts
		below := path + strconv.FormatInt(int64(i), 36)
		name := "KUBE-PART-" + c.id[:12] + below
		part := backends[from:to]
		c.make(name, c.split(part, below))
		r := rule{do: goes(name)}
		if i < parts-1 {
			r.chance = chance(total(part), left)
		}
		left -= total(part)
		rules = append(rules, r)
	}
	return rules
}

func (c *chooser) affinityName(b model.Backend) string {
	return kindAffinity + hashed(c.id+" "+b.AddrPort().String())
}

func total(backends []model.Backend) (sum uint64) {
	for _, b := range backends {
		sum += uint64(b.Weight)
	}
	return sum
}

// chance is part of whole in units of 1<<31, rounded.
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
