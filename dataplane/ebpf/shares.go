package ebpf

import (
	"cmp"
	"hash/fnv"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// Owners of pools share tables, and none gets so much that others get nothing: see bpf/maps.h.
//
//	programs: a flow lasts, a client is there ─► lend      who removes what they have of it ─► giveBack
//	a pass through a table (sweep.go, affinities.go): begin ─► add … add ─► settle: what is lent is what was seen
//
// Owners are numbers, by a hash of their names, that are the same in every process. Two that have one number share a
// share.

const (
	numOwners = uint32(objectsOwnersOWNERS)
	everybody = uint32(objectsOwnersEVERYBODY)
	greed     = int64(objectsOwnersGREED)
)

func ownerOf(id model.PoolID) uint32 {
	h := fnv.New32a()
	_, _ = h.Write([]byte(id.Owner())) // never fails
	return 1 + h.Sum32()%(numOwners-1)
}

// shares are those of a table, in memory of the kernel.
type shares struct {
	all   []objectsShare  // by owner
	room  int64           // for all
	most  int64           // that is lent at a time
	short map[uint32]uint // owners: for how many passes they had nothing left
}

// mapShares has those of a table. At most so many elements are lent at a time.
func mapShares(m *ebpf.Map, table objectsShared, room uint32, most int64) (s shares, unmap func(), err error) {
	all, unmap, err := mapped[objectsShare](m)
	if err != nil {
		return s, nil, err
	}
	s = shares{all: all[uint32(table)*numOwners:][:numOwners], room: int64(room), most: most, short: map[uint32]uint{}}
	return s, unmap, nil
}

func (s shares) giveBack(owner, places uint32) {
	atomic.AddUint32(&s.all[everybody].Returned, places)
	if owner != everybody {
		atomic.AddUint32(&s.all[owner].Returned, places)
	}
}

// held is how many places an owner has.
func (s shares) held(owner uint32) int64 {
	return int64(int32(atomic.LoadUint32(&s.all[owner].Lent) - atomic.LoadUint32(&s.all[owner].Returned)))
}

// isShort reports whether an owner may get nothing more.
func (s shares) isShort(owner uint32) bool {
	left := s.room - s.held(everybody) - s.most
	return left < 0 || s.held(owner)+s.most > greed*left
}

// mayBeShort reports whether any owner can have so much that it may get nothing more.
func (s shares) mayBeShort() bool { return s.isShort(everybody) }

// census is what was seen of each owner in a pass through a table, and what was lent and returned before.
type census struct {
	before []objectsShare
	seen   []uint32
}

func (s shares) begin() census {
	c := census{before: make([]objectsShare, len(s.all)), seen: make([]uint32, len(s.all))}
	for i := range s.all {
		c.before[i] = objectsShare{
			Lent: atomic.LoadUint32(&s.all[i].Lent), Returned: atomic.LoadUint32(&s.all[i].Returned),
		}
	}
	return c
}

func (c census) add(owner, places uint32) {
	c.seen[everybody] += places
	if owner != everybody {
		c.seen[owner] += places
	}
}

// settle makes up for what was counted twice or not at all: two processors may lend at the same moment, and a process
// may die between a deletion and giveBack.
//
// The pass has seen each place that was held all the time. It may have missed a place that was lent or returned during
// the pass. So the number of places held at its begin is known within bounds:
//
//	seen - lent meanwhile  ≤  held at the begin  ≤  seen + returned meanwhile
//
// If the counters said something outside of these bounds, they move to the nearer one.
func (s shares) settle(c census) {
	defer s.review()
	for i := range s.all {
		lent := atomic.LoadUint32(&s.all[i].Lent) - c.before[i].Lent
		returned := atomic.LoadUint32(&s.all[i].Returned) - c.before[i].Returned
		said := int32(c.before[i].Lent - c.before[i].Returned)
		least, most := int32(c.seen[i]-lent), int32(c.seen[i]+returned)
		if said < least {
			atomic.AddUint32(&s.all[i].Lent, uint32(least-said))
		} else if said > most {
			atomic.AddUint32(&s.all[i].Returned, uint32(said-most))
		}
	}
}

// review finds out which owners have nothing left.
func (s shares) review() {
	const most = 13 // of a day ten seconds are left when it is halved so often
	for owner := range numOwners {
		switch had := s.short[owner]; {
		case s.held(owner) > 0 && s.isShort(owner):
			s.short[owner] = min(had+1, most)
		case had > 1:
			s.short[owner]--
		default:
			delete(s.short, owner)
		}
	}
}

// owner is whose flow a way back to a client is of: that has terms in place of the pool.
func (t *packetsTranslation) owner() uint32 {
	return uint32(t.Pool>>packetsTermsTERMS_OWNER) % numOwners
}

// inTwos is a time as terms have it: longer by a second, if need be.
func inTwos(d time.Duration) uint16 { return uint16((seconds(d) + 1) / 2) }

// isWayBack reports whether an element is what has a flow's terms: the way back to its client.
func isWayBack(key packetsTuple, t *packetsTranslation) bool {
	return key.Hook == packetsHookEGRESS && t.State&packetsStateBACK != 0
}

// usedUp names the shares of which nothing is left.
func (p *Plane) usedUp() (all []dataplane.Share, err error) {
	if p.tables == nil {
		return nil, nil
	}
	of := map[string]map[uint32]bool{}
	if of["sessions"], err = p.nameShort(); err != nil {
		return nil, err
	}
	if p.serve == TC {
		of["translated flows"] = p.sweep.shortOwners()
	}
	for what, short := range of {
		if len(short) == 0 {
			continue
		}
		for id := range p.tables.pools {
			if short[ownerOf(id)] {
				all = append(all, dataplane.Share{Namespace: id.Owner(), Of: what})
			}
		}
	}
	slices.SortFunc(all, func(a, b dataplane.Share) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Of, b.Of))
	})
	return slices.Compact(all), nil
}
