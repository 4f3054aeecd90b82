package ebpf

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"

	"github.com/cilium/ebpf"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// sample is how many rows of a kind one Audit looks at. Nobody but us has the tables, so that it is for others who
// look for trouble with bpftool; where there are more rows, each Audit takes others.
const sample = 1000

// Audit implements dataplane.Dataplane.
func (p *Plane) Audit(ctx context.Context, s *model.State) ([]dataplane.Drift, error) {
	drifts, err := p.auditBehind(ctx, s)
	if err != nil {
		return nil, err
	}
	if p.tables == nil {
		return append(drifts, dataplane.Drift{Class: "programs", Object: "programs", Want: "those of this process"}), nil
	}
	drifts = slices.Concat(drifts, p.auditHooks(), p.auditMemory(), p.auditSet())
	if err := p.auditPlaces(); err != nil {
		return nil, fmt.Errorf("ebpf: places of sockets: %w", err)
	}
	if err := p.auditStrays(s); err != nil {
		return nil, fmt.Errorf("ebpf: %w", err)
	}
	for _, audit := range []func(*model.State) ([]dataplane.Drift, error){
		p.tables.auditFrontends, p.tables.auditGuards, p.tables.auditPools, p.tables.auditSurplus,
		p.auditPackets,
	} {
		more, err := audit(s)
		if err != nil {
			return nil, fmt.Errorf("ebpf: read tables: %w", err)
		}
		drifts = append(drifts, more...)
	}
	return drifts, nil
}

// auditBehind has the plane behind look.
func (p *Plane) auditBehind(ctx context.Context, s *model.State) ([]dataplane.Drift, error) {
	switch {
	case p.behind == nil:
		return nil, nil
	case p.serve == TC:
		return p.left.audit(ctx, s)
	}
	return p.behind.Audit(ctx, s)
}

// auditPackets finds devices without programs, and addresses that the programs have and the node has not. It tells of
// flows that could not be looked through.
func (p *Plane) auditPackets(s *model.State) ([]dataplane.Drift, error) {
	if p.serve != TC {
		return nil, p.auditStanding()
	}
	if err := p.sweep.failed(); err != nil {
		return nil, err
	}
	drifts, err := p.devices.drifts()
	if err != nil || !p.devices.takeMoved() {
		return drifts, err
	}
	want, err := p.devices.nodeAddrs()
	if have := p.devices.hiddenBehind(); err == nil && !maps.Equal(have, want) {
		drifts = append(drifts, dataplane.Drift{
			Class: "programs", Object: "what clients are hidden behind", Have: have.String(), Want: want.String(),
		})
	}
	if err == nil && !p.knowsNode(s) {
		drifts = append(drifts, dataplane.Drift{Class: "rows", Object: "what rows allow the node's addresses"})
	}
	return drifts, err
}

// auditHooks finds programs that are not attached as they should be.
func (p *Plane) auditHooks() (drifts []dataplane.Drift) {
	for _, hook := range hookNames() {
		d := dataplane.Drift{Class: "programs", Object: "program at hook " + hook, Want: "that of this process"}
		l := p.openLink(hook)
		if l == nil {
			drifts = append(drifts, d)
			continue
		}
		have, err := l.Info()
		l.Close()
		want, failed := p.sockets.Programs[hook].Info()
		if errors.Join(err, failed) != nil {
			drifts = append(drifts, d)
			continue
		}
		if id, ok := want.ID(); ok && id != have.Program {
			d.Have = fmt.Sprintf("program %d", have.Program)
			drifts = append(drifts, d)
		}
	}
	return drifts
}

// auditMemory finds maps that the next process would not find.
func (p *Plane) auditMemory() (drifts []dataplane.Drift) {
	for _, name := range slices.Sorted(maps.Keys(p.memory)) {
		path := p.memoryPath(name)
		if _, err := os.Stat(path); err != nil {
			drifts = append(drifts, dataplane.Drift{Class: "pins", Object: "pin " + path, Want: "map " + name})
		}
	}
	return drifts
}

// auditSet finds tables that somebody has taken away from the programs.
func (p *Plane) auditSet() (drifts []dataplane.Drift) {
	for _, name := range p.sets.lost(p.tables.Maps) {
		drifts = append(drifts, dataplane.Drift{Class: "programs", Object: "table " + name, Want: "that of this process"})
	}
	return drifts
}

// auditFrontends looks for rows of the State. A map's order is another one each time.
func (t *tables) auditFrontends(s *model.State) (drifts []dataplane.Drift, err error) {
	left := sample
	for key, f := range s.Frontends {
		if left--; left < 0 {
			break
		}
		want := t.value(s, key, f)
		drift, err := t.compare(want)
		if err != nil {
			return nil, err
		}
		if drift != "" {
			d := dataplane.Drift{Class: "frontends", Object: "frontend " + key.String(), Want: f.String()}
			if drift != missing {
				d.Have = drift
			}
			drifts = append(drifts, d)
		}
	}
	return drifts, nil
}

const missing = "nothing"

// compare says what the kernel has in place of an element; it is empty if it has that.
func (t *tables) compare(want objectsFrontend) (string, error) {
	var have objectsFrontend
	err := t.Maps[objectsMapFrontends].Lookup(want.Key, &have)
	switch {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return missing, nil
	case err != nil:
		return "", err
	case have != want:
		return "something else", nil
	}
	return "", nil
}

func (t *tables) auditGuards(s *model.State) (drifts []dataplane.Drift, err error) {
	left := sample
	for prefix, verdict := range s.Guards {
		if left--; left < 0 {
			break
		}
		same, err := t.hasGuard(prefix, verdict)
		if err != nil {
			return nil, err
		}
		if !same {
			drifts = append(drifts, dataplane.Drift{
				Class: "guards", Object: "guard " + prefix.String(), Want: verdict.String(),
			})
		}
	}
	return drifts, nil
}

func (t *tables) hasGuard(p netip.Prefix, verdict model.Verdict) (bool, error) {
	if p.IsSingleIP() {
		want := objectsFrontend{Key: hostKey(p.Addr())}
		want.Any.Verdict = uint8(verdict)
		drift, err := t.compare(want)
		return drift == "", err
	}
	// A look-up may find a wider prefix; that is why the keys of both are compared by their verdicts only.
	var have objectsVerdict
	err := t.Maps[objectsMapGuards].Lookup(guardKey(p), &have)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return false, nil
	}
	return have == objectsVerdict(verdict), err
}

// auditPools compares memory with memory.
func (t *tables) auditPools(s *model.State) (drifts []dataplane.Drift, err error) {
	left := sample
	for id, want := range s.Pools {
		if left--; left < 0 {
			break
		}
		p := t.pools[id]
		if p != nil {
			left -= int(p.count / 64)
		}
		if p == nil || !t.holds(p, id, want) {
			d := dataplane.Drift{Class: "pools", Object: "pool " + id.String(), Want: fmt.Sprint(want.Serving())}
			if p != nil {
				d.Have = "something else"
			}
			drifts = append(drifts, d)
		}
	}
	return drifts, nil
}

// holds reports whether the kernel has a pool as it should be.
func (t *tables) holds(p *pool, id model.PoolID, want model.Pool) bool {
	serving := want.Serving()
	slots := make([]objectsSlot, slotsFor(want, len(serving)))
	spread(slots, want, serving)
	entry := objectsPool{
		First: p.first, Count: uint32(len(slots)), Name: poolName(id), Affinity: seconds(want.Affinity), Hashed: hashed(want),
	}
	return t.entries[p.number] == entry && slices.EqualFunc(t.slots[p.first:p.first+p.count], slots, sameSlot)
}

// auditSurplus looks for elements that the State does not have.
func (t *tables) auditSurplus(s *model.State) (drifts []dataplane.Drift, err error) {
	keys, values := make([]objectsFrontendKey, sample), make([]objectsFrontend, sample)
	n, err := t.Maps[objectsMapFrontends].BatchLookup(&t.audited, keys, values, nil)
	if err != nil {
		t.audited = ebpf.MapBatchCursor{} // from the start the next time
		if !errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil, err
		}
	}
	for _, key := range keys[:n] {
		if !known(s, key) {
			drifts = append(drifts, dataplane.Drift{Class: "frontends", Object: key.String(), Have: "an element"})
		}
	}
	return drifts, nil
}

func known(s *model.State, key objectsFrontendKey) bool {
	k := key.model()
	if k.Port == 0 {
		_, ok := s.Guards[netip.PrefixFrom(k.Addr, k.Addr.BitLen())]
		return ok
	}
	for _, k.Scope = range []model.Scope{model.Any, model.Internal} {
		if _, ok := s.Frontends[k]; ok {
			return true
		}
	}
	return false
}
