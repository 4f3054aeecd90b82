package iptables

import (
	"errors"
	"maps"
	"slices"

	"golang.org/x/sync/errgroup"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/model"
)

// To find differences by laying out all rows anew takes longer than to read tables. So Audit first compares what it
// reads with sums of the chains' rules. Only where these differ it is laid out again.
//
//	tables ─► content ─► sums as known? ─ yes ─► rules in the kernel's own chains ──► planned ─► Drift
//	                            └ no ─► layout ─► difference, chain by chain ──────────┘   └─► Repair

// planned is what there is to do.
type planned struct {
	families []*familyState
	changes  []*change
	stale    []string // ipsets that no rule needs then
}

// toDo is what an Audit has found, if nothing has changed since, or plan.
func (p *Plane) toDo(s *model.State, found *planned) (*planned, error) {
	if found != nil && p.elsewhere == nil {
		if same, err := p.backend.asLoaded(tablesOf(p.v6...)); same && err == nil {
			return found, nil
		}
	}
	stored, err := p.load()
	if err != nil {
		return nil, err
	}
	return p.plan(s, stored, true)
}

// compare is plan for Audit. It makes nothing, and so is never refused.
func (p *Plane) compare(s *model.State) (*planned, error) {
	stored, err := p.load()
	if err != nil {
		return nil, err
	}
	if todo := p.asKnown(s, stored); todo != nil {
		return todo, nil
	}
	return p.plan(s, stored, false)
}

// stored is what the kernel holds.
type stored struct {
	sets   []string // ipsets
	moved  bool     // they have other numbers than before
	tables [][2]*content
}

// load reads it, the families side by side.
func (p *Plane) load() (*stored, error) {
	if err := p.config.Inject("iptables list"); err != nil {
		return nil, err
	}
	sets, err := p.ipsets.list()
	if err != nil {
		return nil, err
	}
	before := maps.Clone(p.ipsets.indexes)
	if err := p.ipsets.know(sets); err != nil {
		return nil, err
	}
	found := &stored{sets: sets, moved: !maps.Equal(before, p.ipsets.indexes), tables: make([][2]*content, len(p.v6))}
	var both errgroup.Group
	for i, v6 := range p.v6 {
		both.Go(func() (err error) {
			for n, name := range tableNames {
				if err == nil {
					found.tables[i][n], err = p.backend.load(tableID{v6, name})
				}
			}
			return err
		})
	}
	return found, both.Wait()
}

// asKnown is what there is to do if the chains are as they should be, but for those that are laid out quickly. It is
// nil if others differ, too, or if that is not known.
func (p *Plane) asKnown(s *model.State, found *stored) *planned {
	if p.families == nil || found.moved {
		return nil
	}
	p.backend.use(p.ipsets.indexes)
	todo := &planned{families: p.families}
	needed := map[string]setUse{}
	for i, f := range p.families {
		changes := f.differing(p.backend, s, found.tables[i])
		if changes == nil {
			return nil
		}
		todo.changes = append(todo.changes, changes...)
		maps.Copy(needed, f.sets)
	}
	todo.stale = without(found.sets, needed)
	return todo
}

// differing is asKnown for a family.
func (f *familyState) differing(b backend, s *model.State, tables [2]*content) (changes []*change) {
	var quickly [2]map[string][]rule
	for n, have := range tables {
		id := tableID{f.v6, tableNames[n]}
		c := newChange(id)
		if part := f.astray(n, have); len(part.chains)+len(part.missing) > 0 {
			if quickly[n] == nil {
				quickly = f.quickly(s)
			}
			w := wanted{rules: map[string][]rule{}, known: f.known[n]}
			if !part.take(f.known[n], quickly[n], w.rules) {
				return nil
			}
			var known map[string]sum
			c, known = w.difference(b, id, &part.content)
			maps.Copy(f.known[n], known)
		}
		c.baseRules(b, have, len(f.known[n]) > 0)
		changes = append(changes, c)
	}
	return changes
}

// astray are the chains of a table that are not as they are known to be. Only of these it is laid out what they should
// be. Another program that empties KUBE-SERVICES makes one chain astray among ten thousand, and Audit has to tell
// what is wrong within its share of a processor.
type astray struct {
	content
	missing []string
}

func (f *familyState) astray(n int, have *content) (o astray) {
	o.content = content{chains: map[string][]uint64{}, base: have.base}
	for name, marks := range have.chains {
		if !f.known[n][name].of(marks) {
			o.chains[name] = marks
		}
	}
	for name := range f.known[n] {
		if _, ok := have.chains[name]; !ok {
			o.missing = append(o.missing, name)
		}
	}
	return o
}

// take looks up what the chains should say; false: that of some is not there.
func (o astray) take(known map[string]sum, from, to map[string][]rule) bool {
	for _, name := range slices.AppendSeq(slices.Clone(o.missing), maps.Keys(o.chains)) {
		if _, ok := known[name]; !ok {
			continue // it is not wanted
		}
		rules, ok := from[name]
		if !ok {
			return false
		}
		to[name] = rules
	}
	return true
}

func without(sets []string, needed map[string]setUse) []string {
	return slices.DeleteFunc(sets, func(name string) bool {
		_, ok := needed[name]
		return ok
	})
}

// of reports whether it is that of a chain.
func (s sum) of(marks []uint64) bool { return s != 0 && s == sumOf(marks) }

func sumOf(marks []uint64) sum {
	s := sum(len(marks)) + 1
	for _, m := range marks {
		s = (s ^ sum(m)) * 0x100000001b3 // as FNV does, by whole words
		s ^= s >> 29
	}
	return max(s, 1)
}

func marksOf(b backend, id tableID, rules []rule) []uint64 {
	marks := make([]uint64, len(rules))
	for i := range rules {
		marks[i] = b.mark(id, &rules[i])
	}
	return marks
}

// plan finds what leads from what the kernel holds to s. The ipsets that are missing it makes, if it may; a
// refusedError is about these.
func (p *Plane) plan(s *model.State, found *stored, may bool) (*planned, error) {
	todo := &planned{families: p.layOut(s, found)}
	var missing error
	needed := map[string]setUse{}
	for _, f := range todo.families {
		maps.Copy(needed, f.sets)
		if !may {
			continue
		}
		err := p.ipsets.need(f.v6, f.sets)
		if err != nil && !refused(err) {
			return nil, err
		}
		missing = errors.Join(missing, err)
	}
	p.backend.use(p.ipsets.indexes)
	p.differences(todo, found)
	todo.stale = without(found.sets, needed)
	return todo, missing
}

// layOut lays out all rows, the families side by side.
func (p *Plane) layOut(s *model.State, found *stored) []*familyState {
	families := make([]*familyState, len(p.v6))
	var both errgroup.Group
	for i, v6 := range p.v6 {
		f := &familyState{layout: newLayout(v6, p.config.Mark, p.options)}
		families[i] = f
		_, f.recorded = found.tables[i][nat].chains[chainLocalnet]
		f.recorded = f.recorded || !f.v6 && p.config.LocalnetWasOff
		f.localnetWasOn = f.v6 || p.localnet.On()
		both.Go(func() error {
			f.all(s)
			f.sets = f.neededSets()
			return nil
		})
	}
	_ = both.Wait() // there is no error
	return families
}

// differences finds what is to be changed in all tables, those of the families side by side.
func (p *Plane) differences(todo *planned, found *stored) {
	todo.changes = make([]*change, len(tableNames)*len(todo.families))
	var both errgroup.Group
	for i, f := range todo.families {
		both.Go(func() error {
			for n, e := range f.take() {
				w := wanted{rules: e.set, known: map[string]sum{}}
				if p.families != nil {
					w.known = p.families[i].known[n]
				}
				c, known := w.difference(p.backend, tableID{f.v6, tableNames[n]}, found.tables[i][n])
				c.baseRules(p.backend, found.tables[i][n], len(w.rules) > 0)
				todo.changes[i*len(tableNames)+n], f.known[n] = c, known
			}
			return nil
		})
	}
	_ = both.Wait() // there is no error
}

// drifts says what is not as it should be if all of it is to be done.
func (todo *planned) drifts() (drifts []dataplane.Drift) {
	if defect.Is(defect.IPTablesAudit) {
		return nil
	}
	for _, c := range todo.changes {
		drifts = append(drifts, c.drifts()...)
	}
	for _, name := range todo.stale {
		drifts = append(drifts, dataplane.Drift{Class: "ipset", Object: "ipset " + name, Have: "clients"})
	}
	return drifts
}

// missingSets are ipsets that there are not. By their numbers, which they will have, rules are told apart.
func (p *Plane) missingSets(todo *planned) (drifts []dataplane.Drift) {
	for _, f := range todo.families {
		for name, use := range f.sets {
			if _, ok := p.ipsets.indexes[name]; !ok {
				drifts = append(drifts, dataplane.Drift{Class: "ipset", Object: "ipset " + name, Want: use.String()})
			}
		}
	}
	return drifts
}
