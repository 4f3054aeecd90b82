package study

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/lab/testbed/kubernetes"
	"fairlead.dev/fairlead/version"
)

// Options say what to measure, and where the rows go.
type Options struct {
	Experiments []Experiment `json:"-"`
	Depth       Depth
	Contenders  []Contender
	// Sizes replaces those of experiments in which the number of Services grows; empty: they have their own.
	Sizes []int
	// Own are the Services in place of generated ones; nil: there are none.
	Own *Own `json:"-"`
	// Most leaves out what needs more endpoints of all Services together; 0: nothing.
	Most int
	// Rounds is how many each contender has in each cell; 0: as many as decide, see Judge.
	Rounds int
	// Judge says what is undecided; nil: each cell has FirstRounds.
	Judge func(*Result) Needs `json:"-"`
	// Budget is the time that rounds are added for; 0: there is no limit.
	Budget time.Duration
	// Args are those of the command, see Arguments.
	Args []string `json:"-"`
	// Dir is where the journal is; a run that was interrupted goes on from what is there.
	Dir string
	// Program starts Fairlead; its arguments are appended.
	Program []string
	// TestKernel is the file of a kernel with IPVS. Experiments are repeated in it for contenders that need IPVS, if
	// this one has none; empty: they are not.
	TestKernel string
	// Progress receives each step; nil: steps are not reported.
	Progress func(Progress) `json:"-"`
	// Say receives urgent news for a waiting user: that a contender has failed. nil: it is not reported.
	Say func(string) `json:"-"`
}

// Run measures. Findings before an error, or before ctx ended, are in the journal and in the Result.
func Run(ctx context.Context, o Options) (*Result, error) {
	l := newLab(o, This)
	var err error
	if l.journal, err = openJournal(o.Dir, o.Args, l.header(ctx)); err != nil {
		return nil, err
	}
	defer l.journal.file.Close()
	l.remember()
	err = l.measureAll(ctx)
	r := l.journal.result()
	r.Missing = append(l.missing, r.Missing...)
	r.Ended, r.Complete = time.Now(), err == nil && !l.failed
	return r, errors.Join(err, r.write(l.journal.dir))
}

func newLab(o Options, kernel string) *lab {
	l := &lab{Options: o, kernel: kernel, began: time.Now(), clock: estimate{}, last: rest}
	l.open = l.newSite
	for _, e := range o.Experiments {
		for _, c := range o.cells(e, kernel) {
			l.add(e, c)
		}
	}
	slices.SortStableFunc(l.groups, func(a, b *group) int {
		return cmp.Compare(a.cluster.Services*a.cluster.Endpoints, b.cluster.Services*b.cluster.Endpoints)
	})
	return l
}

// cells are those of an experiment that are wanted.
func (o Options) cells(e Experiment, kernel string) []Cell {
	cells := e.Cells(o.Depth)
	switch {
	case kernel == Test && e.ForIPVS != nil:
		cells = e.ForIPVS(o.Depth)
	case kernel == Test:
		cells = e.Cells(Standard)
	}
	if len(o.Sizes) > 0 && e.Axis == servicesAxis {
		cells = sized(cells, o.Sizes)
	}
	if o.Own != nil {
		cells = o.Own.of(cells, e.Axis)
	}
	if o.Most > 0 {
		cells = slices.DeleteFunc(cells, func(c Cell) bool { return c.Cluster.Services*max(c.Cluster.Endpoints, 1) > o.Most })
	}
	return cells
}

// lab is a run on a kernel.
type lab struct {
	Options
	kernel  string
	groups  []*group
	journal *journal
	open    func(context.Context, Contender, Cluster, *kubernetes.Catalog) *Site // makes a site
	missing []Missing
	failed  bool       // a contender has
	send    func(word) // send gets each row and each contender that is left out; may be nil
	began   time.Time
	clock   estimate
	needs   Needs
	judged  time.Time // needs are good until then
	stage   stage
	last    stage     // that the run ends with
	until   time.Time // when the stage ends
}

// group are cells that share their sites.
type group struct {
	cluster Cluster
	cells   []task
}

// task is a cell with its contenders.
type task struct {
	Cell
	experiment string
	contenders []Contender
}

func (l *lab) add(e Experiment, c Cell) {
	t := task{c, e.Name, l.Contenders}
	if c.Contenders != nil {
		t.contenders = c.Contenders(slices.Clone(l.Contenders))
	}
	for _, g := range l.groups {
		if g.cluster == c.Cluster {
			g.cells = append(g.cells, t)
			return
		}
	}
	l.groups = append(l.groups, &group{c.Cluster, []task{t}})
}

// header is a Result without rows.
func (l *lab) header(ctx context.Context) Result {
	r := Result{
		Format: Format, Version: version.String(), Depth: l.Depth, Started: l.began, Services: l.Own.String(),
		Kernels: []Kernel{describeKernel(l.kernel)}, Contenders: l.Contenders,
	}
	r.Kernels[0].Programs = programs(ctx, l.Contenders)
	for _, e := range l.Experiments {
		d := e.Description
		d.Figures = slices.Concat(d.Figures, costFigures())
		r.Experiments = append(r.Experiments, d)
	}
	return r
}

// endOfTime is when a run without a budget ends.
const endOfTime = 1000 * time.Hour

// measureAll measures here, and in the test kernel what needs that.
func (l *lab) measureAll(ctx context.Context) error {
	until := l.began.Add(cmp.Or(l.Budget, endOfTime))
	if err := l.findMissing(ctx); err != nil {
		return err
	}
	if l.TestKernel == "" || !l.lacksIPVS() || time.Until(until) < shortest {
		return l.spend(ctx, until, l.last)
	}
	// Cells that published conclusions wait for come first, on both kernels.
	if err := l.spend(ctx, time.Now().Add(time.Until(until)/2), published); err != nil {
		return err
	}
	for _, last := range []stage{published, rest} {
		end := until
		if last == published {
			end = until.Add(-time.Until(until) / 10) // the tenth is for what is nearly decided here
		}
		if err := l.repeat(ctx, end, last); err != nil {
			return err
		}
		if err := l.spend(ctx, until, rest); err != nil {
			return err
		}
	}
	return nil
}

// findMissing tries each contender with one Service. A contender that cannot run here is reported once, and left out.
func (l *lab) findMissing(ctx context.Context) error {
	catalog, err := Cluster{Services: 1, Endpoints: 1}.catalog()
	if err != nil {
		return err
	}
	for _, c := range l.present() {
		if l.isMissing(c) {
			continue
		}
		l.tell("trying "+c.Name, task{})
		s := l.open(ctx, c, Cluster{Services: 1, Endpoints: 1}, catalog)
		err := s.failed
		if err == nil {
			err = errors.Join(s.lacking(ctx), s.close())
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			l.miss(c, err)
		}
	}
	l.leaveOut()
	l.sayMissing()
	l.failed = l.failed || l.lostProgram()
	return nil
}

// lostProgram reports whether all modes of a peer are left out: it is the peer that fails then, not the machine.
func (l *lab) lostProgram() bool {
	return slices.ContainsFunc(l.Contenders, func(c Contender) bool {
		return c.Kind == Peer && !slices.ContainsFunc(l.Contenders, func(o Contender) bool {
			return o.Program == c.Program && !l.isMissing(o)
		})
	})
}

func (l *lab) miss(c Contender, err error) {
	m := Missing{c.Name, l.kernel, err.Error()}
	if words := (kubernetes.LastWords{}); errors.As(err, &words) {
		m.Why = "its last words: " + words.Line()
	}
	if l.missing = append(l.missing, m); l.send != nil {
		l.send(word{Missing: &m})
	}
}

// sayMissing has a line for each reason.
func (l *lab) sayMissing() {
	names := map[string][]string{}
	for _, m := range l.missing {
		names[m.Why] = append(names[m.Why], m.Contender)
	}
	for _, m := range l.missing {
		if who := names[m.Why]; who[0] == m.Contender {
			l.say(strings.Join(who, ", ") + " left out: " + m.Why)
		}
	}
}

// isMissing reports whether a contender cannot take part: it itself, or the one of the options that has its data plane,
// or that which it is to change to.
func (l *lab) isMissing(c Contender) bool {
	return slices.ContainsFunc(l.missing, func(m Missing) bool {
		return m.Contender == c.Name || slices.ContainsFunc(l.Contenders, func(o Contender) bool {
			return m.Contender == o.Name && c.needs(o)
		})
	})
}

// needs reports whether a contender can take part only if another one can.
func (c Contender) needs(o Contender) bool {
	return c.Kind == o.Kind && c.Program == o.Program && (c.Plane == o.Plane || c.To == o.Plane)
}

// present are all contenders that have a turn that is not over, each name once. Contenders of the options that they
// need come before them.
func (l *lab) present() (all []Contender) {
	var some []Contender
	for _, g := range l.groups {
		some = append(some, l.needed(g)...)
	}
	for _, o := range l.Contenders {
		if slices.ContainsFunc(some, func(c Contender) bool { return c.needs(o) }) {
			all = append(all, o)
		}
	}
	return once(append(all, some...))
}

// once are contenders, each name once.
func once(all []Contender) []Contender {
	seen := map[string]bool{}
	return slices.DeleteFunc(all, func(c Contender) bool {
		known := seen[c.Name]
		seen[c.Name] = true
		return known
	})
}

// leaveOut takes missing contenders out of all cells.
func (l *lab) leaveOut() {
	for _, g := range l.groups {
		for i := range g.cells {
			g.cells[i].contenders = slices.DeleteFunc(slices.Clone(g.cells[i].contenders), l.isMissing)
		}
	}
}

// needed are the contenders that want turns in a group, in the order of contenders.
func (l *lab) needed(g *group) (all []Contender) {
	for _, t := range g.cells {
		all = append(all, l.wanting(t)...)
	}
	return once(all)
}

// measure adds rounds to the cells of a group until they want no more, or the time is over.
func (l *lab) measure(ctx context.Context, g *group, until time.Time) (err error) {
	sites := map[string]*Site{}
	defer func() {
		for _, s := range sites {
			err = errors.Join(err, s.close())
		}
	}()
	for t, end := l.next(g, until); t != nil; t, end = l.next(g, until) {
		if err := l.makeSites(ctx, *t, sites); err != nil {
			return err
		}
		if err := l.warmUp(ctx, *t, sites); err != nil {
			return err
		}
		for more := true; more; more = time.Now().Before(end) && l.sited(*t, sites) {
			if err := l.addRound(ctx, *t, sites); err != nil {
				return err
			}
		}
	}
	return nil
}

// sited reports whether contenders of a cell want turns, and all of them have a site.
func (l *lab) sited(t task, sites map[string]*Site) bool {
	all := l.wanting(t)
	return len(all) > 0 && !slices.ContainsFunc(all, func(c Contender) bool { return sites[c.Name] == nil })
}

// addRound gives each contender that wants one a turn.
func (l *lab) addRound(ctx context.Context, t task, sites map[string]*Site) error {
	last := 0
	for _, c := range t.contenders {
		last = max(last, l.journal.of(l.row(t, c, 0).turns()).last)
	}
	for _, c := range shuffled(l.wanting(t)) {
		row := l.row(t, c, last+1)
		if l.Rounds > 0 { // one that was interrupted has all of them
			row.Round = l.journal.of(row.turns()).last + 1
		}
		if err := l.turn(ctx, sites[c.Name], t, row); err != nil {
			return err
		}
	}
	l.judge()
	return nil
}

// warmly is how long a turn may take for one more, which does not count, to be worth it.
const warmly = 500 * time.Millisecond

// warmUp gives each contender that wants turns one that does not count: the first one of a cell starts processes, meets
// neighbours and touches memory for the first time. A failure there will recur.
func (l *lab) warmUp(ctx context.Context, t task, sites map[string]*Site) error {
	if t.Takes == 0 || t.Takes > warmly {
		return nil
	}
	for _, c := range shuffled(l.wanting(t)) {
		if s := sites[c.Name]; s.failed == nil {
			l.tell(t.name()+": "+s.Name+" warms up", t)
			_, _ = t.play(ctx, s)
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	return nil
}

// makeSites makes those that contenders of a cell lack.
func (l *lab) makeSites(ctx context.Context, t task, sites map[string]*Site) error {
	needed := slices.DeleteFunc(l.wanting(t), func(c Contender) bool { return sites[c.Name] != nil })
	if len(needed) == 0 {
		return nil
	}
	catalog, err := t.Cluster.catalog()
	if err != nil {
		return err
	}
	for _, c := range needed {
		l.tell(fmt.Sprintf("starting %s with %d Services", c.Name, t.Cluster.Services), task{})
		begin := time.Now()
		s := l.open(ctx, c, t.Cluster, catalog)
		sites[c.Name] = s
		l.clock.took(time.Since(begin), "")
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if s.failed != nil {
			l.say(s.failed.Error())
		}
	}
	return nil
}

// catalog has the objects of a cluster.
func (c Cluster) catalog() (*kubernetes.Catalog, error) { return kubernetes.NewCatalog(c.objects()...) }

func shuffled(all []Contender) []Contender {
	all = slices.Clone(all)
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all
}

// row is that of a turn, without its figures.
func (l *lab) row(t task, c Contender, round int) Row {
	return Row{
		Experiment: t.experiment, Kernel: l.kernel, Case: t.Case, Size: t.Size, Contender: c.Name, Round: round,
		At: time.Now(),
	}
}

// turn is a contender's. The error is one that ends the run.
func (l *lab) turn(ctx context.Context, s *Site, t task, row Row) error {
	if s.failed != nil {
		l.failed = true
		row.Round, row.Failed = 0, s.failed.Error()
		return l.write(row)
	}
	l.tell(t.name()+": "+s.Name, t)
	begin := time.Now()
	figures, err := t.play(ctx, s)
	took := time.Since(begin)
	if ctx.Err() != nil { // what it broke off says nothing
		return context.Cause(ctx)
	}
	l.clock.took(took, t.name(), t.experiment)
	if row.Figures, row.Took = figures, took.Seconds(); err != nil {
		l.failed = true
		row.Figures, row.Failed = nil, err.Error()
		l.say(fmt.Sprintf("%s, %s: %s", t.experiment, s.Name, err))
	}
	return l.write(row)
}

// write keeps a row, for good.
func (l *lab) write(row Row) error {
	if l.send != nil {
		l.send(word{Row: &row})
	}
	return l.journal.append(row)
}

// play is a turn. A site whose proxy has ended is no more.
func (t task) play(ctx context.Context, s *Site) (Figures, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, t.limit(), fmt.Errorf("it took more than %s", t.limit()))
	defer cancel()
	before := s.costs(ctx)
	figures, err := t.Turn(ctx, s)
	if err == nil && figures != nil {
		s.costs(ctx).addTo(figures, before)
	}
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if s.Proxy != nil {
		if ended := s.Proxy.Check(); ended != nil {
			s.fail(fmt.Errorf("%s: %w", s.Name, ended))
			return nil, s.failed
		}
	}
	return figures, err
}

func (l *lab) say(what string) {
	if l.Say != nil {
		l.Say(what)
	}
}
