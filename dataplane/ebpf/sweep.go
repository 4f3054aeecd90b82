package ebpf

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/defect"
)

// phases are seconds for each thing that a flow can be at.
type phases [packetsPhasePHASES]uint32

// patience is for how long a flow may be silent. The programs know it from here. It is what connection tracking has by
// default and, for what is open or half closed, what kube-proxy sets there. But what is over has a port of the node for
// ten seconds and not for two minutes. A reset is not believed for as long: who sends one need not be a part of the
// connection, and only its ends know that. A connection that goes on is not broken.
func patience() *phases {
	const minute, hour, day = 60, 60 * 60, 24 * 60 * 60
	return &phases{
		packetsPhaseUDP_ASKING:  30,
		packetsPhaseUDP_LASTING: 2 * minute,
		packetsPhaseBEGINNING:   minute,
		packetsPhaseTCP_OPEN:    day,
		packetsPhaseSCTP_OPEN:   210,
		packetsPhaseHALF_CLOSED: hour,
		packetsPhaseRESET:       2 * minute,
		packetsPhaseOVER:        10,
	}
}

// phase is what the programs' function of that name says.
func phase(protocol uint8, state packetsState) packetsPhase {
	const bothEnd = packetsStateCLIENT_ENDS | packetsStateBACKEND_ENDS
	switch {
	case protocol == unix.IPPROTO_UDP && state&packetsStateLASTING != 0:
		return packetsPhaseUDP_LASTING
	case protocol == unix.IPPROTO_UDP:
		return packetsPhaseUDP_ASKING
	case state&(packetsStateBROKEN|packetsStateANSWERED) == packetsStateBROKEN, state&bothEnd == bothEnd:
		return packetsPhaseOVER
	case state&packetsStateBROKEN != 0:
		return packetsPhaseRESET
	case state&packetsStateLASTING == 0:
		return packetsPhaseBEGINNING
	case state&bothEnd != 0:
		return packetsPhaseHALF_CLOSED
	case protocol == unix.IPPROTO_SCTP:
		return packetsPhaseSCTP_OPEN
	}
	return packetsPhaseTCP_OPEN
}

// flowMaps are the tables that flows are remembered in. They belong together, and outlive the programs.
func flowMaps() []string {
	return []string{
		packetsMapTranslations, packetsMapAsking, packetsMapFragments, activityTable, packetsMapNoted, packetsMapTraffic,
	}
}

const (
	// sweepPace is the time between two steps.
	sweepPace = time.Second
	// sweepCalls is in how many steps a full table is looked through: in a minute, or in ten seconds when it is half full.
	sweepCalls, sweepSoon = 60, 10
	// sweepShare is how much of the table is read at once.
	sweepShare = 4096
	// sweepRest is the time from the begin of one pass to that of the next, at least: the table may be almost empty.
	sweepRest packetsTicks = 10 * packetsTicksTICKS
	// sweepOrphans is how many followers one step looks up the flows of.
	sweepOrphans = 256
	// orphanAge is what a translation has that is no longer about to become a part of a flow.
	orphanAge packetsTicks = 60 * packetsTicksTICKS
)

// sweep removes flows that are over, a share of the table at a time, and what is left of flows that the kernel has
// forgotten. The programs remove none: a packet that is too late for its flow begins a new one, but for most none
// comes.
//
//	start ─► a goroutine ── once a second ─► turn: a step through the table; addresses that the node has lost
//	Sync ─► resetFlowFilter      Counters ─► rest, inUse         Audit ─► failed      close: the goroutine has ended
//
// The goroutine holds mu for a whole turn: callers from elsewhere wait for its end, and never see half a step.
type sweep struct {
	stop, ended chan struct{} // of the owner; nil: it has no goroutine yet

	// These do not change. Programs read and write the kernel's memory, too, one atomic word at a time.
	maps     map[string]*ebpf.Map
	patience phases
	activity *packetsActivity // memory of the kernel
	shares   shares           // likewise
	unmap    []func()

	mu      sync.Mutex // guards what follows, with the fields of filter
	err     error      // of the last turn
	filter  *flowFilter
	cursor  ebpf.MapBatchCursor
	passing bool         // through the table: the next share goes on where the last one ended
	swept   bool         // once at least
	began   packetsTicks // when the last pass did
	kept    int          // seen in this pass
	removed int          // likewise
	left    int          // after the last pass
	orphans int          // that this step may still look up
	census  census
	loads   *loads                   // of backends; nil: none are known
	weighed map[uint64]bool          // pools by whose loads this pass counts flows
	open    map[objectsLoadKey]int32 // seen in this pass
	keys    []packetsTuple
	values  []packetsTranslation
	rest    map[packetsTrafficKey]packetsTraffic // of flows that are gone
}

// newSweep makes a sweep of tables, which it does not own. The directory is that of all who sweep them.
func newSweep(maps map[string]*ebpf.Map, p *phases, dir string) (*sweep, error) {
	activity, unmap, err := mapped[packetsActivity](maps[activityTable])
	if err != nil {
		return nil, fmt.Errorf("%s: %w", activityTable, err)
	}
	const mostAtOnce = 4 // places that one packet makes programs lend
	room := roomOf(maps[packetsMapTranslations].MaxEntries(), maps[packetsMapAsking].MaxEntries())
	shared, unmapShares, err := mapShares(maps[objectsMapShares], objectsSharedOF_FLOWS, room, mostAtOnce)
	if err != nil {
		unmap()
		return nil, err
	}
	n, err := openFlowFilter(maps[packetsMapNoted], maps[packetsMapTranslations], dir)
	if err != nil {
		unmap()
		unmapShares()
		return nil, err
	}
	const share = sweepShare
	s := &sweep{
		shares: shared, unmap: []func(){unmap, unmapShares}, filter: n, activity: &activity[0],
		maps: map[string]*ebpf.Map{}, patience: *p,
		keys: make([]packetsTuple, share), values: make([]packetsTranslation, share),
		rest: map[packetsTrafficKey]packetsTraffic{},
	}
	for _, name := range flowMaps() {
		s.maps[name] = maps[name]
	}
	atomic.StoreUint32(&s.activity.Busy, 1) // whether there are flows already, and which, the first pass finds out
	return s, nil
}

// lost has the addresses dropped that the node has lost. It remembers those of which that fails.
type lost func(drop func([]netip.Addr) error) error

// start has a goroutine sweep from now on, whatever Audit's pace is. It asks which addresses the node has lost. The
// table has all its flows by now: where it finds none, programs do not look for any.
func (s *sweep) start(lost lost) {
	if s.stop != nil {
		return
	}
	s.stop, s.ended = make(chan struct{}), make(chan struct{})
	go func() {
		defer close(s.ended)
		pace := time.NewTicker(sweepPace)
		defer pace.Stop()
		for {
			s.turn(lost)
			select {
			case <-s.stop:
				return
			case <-pace.C:
			}
		}
	}()
}

func (s *sweep) close() error {
	if s.stop != nil {
		close(s.stop)
		<-s.ended
	}
	for _, unmap := range s.unmap {
		unmap()
	}
	return s.filter.close()
}

// turn does what is due once in a second.
func (s *sweep) turn(lost lost) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, err := s.step()
	s.err = errors.Join(err, lost(s.dropHidden))
}

// resetFlowFilter has no list of flows in force until a pass is over that begins from now on. It waits for a turn to
// end: one that goes on could put its list in force by the number that reset draws.
func (s *sweep) resetFlowFilter() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.filter.reset()
}

// failed is the error of the last turn.
func (s *sweep) failed() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// shortOwners are those that have no places left.
func (s *sweep) shortOwners() map[uint32]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	owners := make(map[uint32]bool, len(s.shares.short))
	for owner := range s.shares.short {
		owners[owner] = true
	}
	return owners
}

// inUse is how many elements the table has, for other goroutines.
func (s *sweep) inUse() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.elements()
}

// quiet is for how long a translation was not used: 0 if a program has used it after what is now here.
func (t packetsTranslation) quiet(now packetsTicks) packetsTicks {
	return packetsTicks(max(int32(now-t.Last), 0))
}

// now is the time as the programs have it: see bpf/flows.h. Differences are right for 24 days.
func now() (packetsTicks, error) {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		return 0, fmt.Errorf("clock_gettime: %w", err)
	}
	return packetsTicks(t.Nano() >> 20), nil
}

// elements are how many the table has, as far as is known: after the last pass, or already in this one.
func (s *sweep) elements() int { return max(s.left, s.kept-s.removed) }

// used is which part of the table is in use, in hundredths.
func (s *sweep) used() int {
	return 100 * s.elements() / int(s.maps[packetsMapTranslations].MaxEntries())
}

// half is in hundredths: a table of which more is in use is looked through more often.
const half = 50

// limit is for how many seconds a flow may be silent at a phase, of whose owner it is known for how many passes it has
// had no places left. Flows go that are about to end, and then those that are silent for longest: a day for open ones
// is halved each time.
func (s *sweep) limit(phase packetsPhase, short uint) packetsTicks {
	const hurry = 10
	patience := packetsTicks(s.patience[phase])
	switch {
	case short == 0:
		return patience
	case phase == packetsPhaseUDP_LASTING || phase == packetsPhaseTCP_OPEN || phase == packetsPhaseSCTP_OPEN:
		return max(patience>>short, min(hurry, patience))
	}
	return min(hurry, patience)
}

// shortOf is for how many passes the owner of a flow has had no places left.
func (s *sweep) shortOf(key packetsTuple, flow *packetsTranslation) (uint, error) {
	if len(s.shares.short) == 0 || flow.Held&packetsHeldPLACES == 0 {
		return 0, nil
	}
	var back packetsTranslation
	if ok, err := s.look(at(packetsHookEGRESS, key.Protocol, flow.Dst, flow.Src), &back); !ok || err != nil {
		return 0, err
	}
	return s.shares.short[back.owner()], nil
}

// step looks at the next shares of the table, and returns how many flows it has removed.
//
// A pass through the table takes many steps, during which programs go on to change it. Four things come out of it:
//
//	each flow ─► judge: silent for too long? ─► forget     the flow filter: which keys there are
//	each way back ─► census: whose it is ──────► shares     at the end: an empty table needs no look-up at all
//
// The pass begins by emptying what it makes (the next filter, the census, Laid), so that what programs add meanwhile
// counts as well. The results are published at its end only, and only if no other process has begun a pass.
func (s *sweep) step() (gone int, err error) {
	now, err := now()
	if err != nil || atomic.LoadUint32(&s.activity.Busy) == 0 {
		return 0, err
	}
	if !s.passing {
		if s.swept && now-s.began < sweepRest && s.used() < half {
			return 0, nil
		}
		s.passing, s.swept, s.began, s.cursor = true, true, now, ebpf.MapBatchCursor{}
		s.kept, s.removed, s.census = 0, 0, s.shares.begin()
		s.weighed, s.open = s.loads.chooseFor(), map[objectsLoadKey]int32{}
		atomic.StoreUint32(&s.activity.Laid, 0)
		if err := s.filter.begin(); err != nil {
			return 0, fmt.Errorf("begin a list of flows: %w", err)
		}
	}
	calls := sweepCalls
	if s.used() >= half {
		calls = sweepSoon
	}
	s.orphans = sweepOrphans
	shares := 1 + int(s.maps[packetsMapTranslations].MaxEntries())/sweepShare/calls
	for ; s.passing && shares > 0; shares-- {
		n, err := s.share(now)
		if gone += n; err != nil {
			return gone, err
		}
	}
	return gone, nil
}

// share reads one batch of flows, notes their keys and owners, and removes those that are over. With the last batch it
// publishes the results of the pass.
func (s *sweep) share(now packetsTicks) (gone int, err error) {
	n, err := s.maps[packetsMapTranslations].BatchLookup(&s.cursor, s.keys, s.values, nil)
	last := errors.Is(err, ebpf.ErrKeyNotExist)
	if err != nil && !last {
		s.passing = false
		return 0, fmt.Errorf("read flows: %w", err)
	}
	s.kept += n
	for i := range s.keys[:n] { // also of those that are removed now: a packet may want its flow back
		s.filter.add(&s.keys[i])
		if t := &s.values[i]; isWayBack(s.keys[i], t) {
			s.census.add(t.owner(), uint32(t.Held&packetsHeldPLACES))
		}
	}
	for i, key := range s.keys[:n] {
		removed, err := s.judge(key, &s.values[i], now)
		if err != nil {
			return gone, err
		}
		if removed {
			gone++
		} else if s.weighed[s.values[i].Pool] && s.values[i].loadsBackend(key) {
			s.open[s.values[i].loadKey()]++
		}
	}
	if last {
		s.passing, s.left = false, max(s.kept-s.removed, 0)
		s.filter.finish()
		s.shares.settle(s.census)
		err = s.correctLoads()
	}
	if last && s.kept == 0 {
		s.idle()
	}
	return gone, err
}

// correctLoads has loads be as many as there are open flows. That there are none is known for sure.
func (s *sweep) correctLoads() error {
	if len(s.weighed) == 0 {
		return nil
	}
	err := s.loads.correct(objectsBearerBY_PACKETS, s.open)
	if err == nil && s.kept == 0 {
		err = s.loads.correct(objectsBearerBY_PACKETS, nil)
	}
	if err != nil {
		return fmt.Errorf("loads: %w", err)
	}
	return nil
}

// loadsBackend reports whether a translation is a flow of this node that is open, as the programs' function weigh does.
func (t *packetsTranslation) loadsBackend(key packetsTuple) bool {
	ended := t.State&packetsStateBROKEN != 0 ||
		t.State&packetsStateCLIENT_ENDS != 0 && t.State&(packetsStateBACKEND_ENDS|packetsStateDIRECT) != 0
	return key.Hook == packetsHookINGRESS && t.State&(packetsStateBACK|packetsStateTOLD) == 0 && !ended
}

// idle lets the programs know that there are no flows, unless one was made meanwhile.
func (s *sweep) idle() {
	const busy, idle = 1, 0 // Laid, the upper half where these programs run, is 0
	atomic.CompareAndSwapUint64((*uint64)(unsafe.Pointer(s.activity)), busy, idle)
}

// judge removes a translation if it is a flow that is over, or follows from none. It reports whether it was a flow.
func (s *sweep) judge(key packetsTuple, t *packetsTranslation, now packetsTicks) (bool, error) {
	silent := t.quiet(now)
	if key.Hook == packetsHookINGRESS && t.State&packetsStateBACK == 0 {
		short, err := s.shortOf(key, t)
		if err != nil {
			return false, err
		}
		if silent <= s.limit(phase(key.Protocol, t.State), short)*packetsTicksTICKS || defect.Is(defect.EBPFFlow) {
			return false, nil
		}
		return s.forget(key, t)
	}
	if silent < orphanAge || s.orphans == 0 {
		return false, nil
	}
	s.orphans--
	if ok, err := s.hasFlow(key, t); ok || err != nil {
		return false, err
	}
	return false, s.remove(key)
}

// look finds a translation. It is false if there is none.
func (s *sweep) look(key packetsTuple, t *packetsTranslation) (bool, error) {
	err := s.maps[packetsMapTranslations].Lookup(key, t)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look up a flow: %w", err)
	}
	return true, nil
}

func (s *sweep) remove(key packetsTuple) error {
	err := s.maps[packetsMapTranslations].Delete(key)
	if err == nil {
		s.removed++
	}
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("remove a flow: %w", err)
	}
	return nil
}

func at(hook packetsHook, protocol uint8, src, dst packetsEndpoint) packetsTuple {
	return packetsTuple{Src: src, Dst: dst, Protocol: protocol, Hook: hook}
}

// forget removes a flow that is as it was when it was read, with what follows from it, as the programs' function of
// that name does.
func (s *sweep) forget(key packetsTuple, read *packetsTranslation) (bool, error) {
	var flow packetsTranslation
	if ok, err := s.look(key, &flow); !ok || err != nil || !flow.as(read) {
		return false, err
	}
	err := s.unlay(key, &flow)
	gone, failed := s.end(key, &flow)
	return gone, errors.Join(err, failed)
}

// as reports whether no packet has used a flow, or begun another one in its place, since it was read.
func (t *packetsTranslation) as(read *packetsTranslation) bool {
	return t.Last == read.Last && t.State == read.State
}

// relaid is for how long a flow seems to be silent at least if its next packet makes again what follows from it.
const relaid = 11 * packetsTicksTICKS

// end removes a flow without what follows from it. If a packet has come meanwhile, the flow goes on.
//
// Neither look-up and delete nor delete and look-up is safe by itself: a packet may use the flow in between. So the
// kernel looks up and deletes in one step. If that shows a flow that was used, it is put back, unless a program has
// made it again already. It then seems to have been silent for some seconds, so that its next packet makes again what
// follows from it, which unlay has removed.
func (s *sweep) end(key packetsTuple, read *packetsTranslation) (bool, error) {
	var flow packetsTranslation
	err := s.maps[packetsMapTranslations].LookupAndDelete(key, &flow)
	switch {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return false, nil
	case errors.Is(err, ebpf.ErrNotSupported): // before Linux 5.14
		s.book(read, packetsDirectionTO_BACKEND, read)
		return true, errors.Join(s.remove(key), s.loads.ended(read))
	case err != nil:
		return false, fmt.Errorf("remove a flow: %w", err)
	case flow.as(read):
		s.removed++
		s.book(&flow, packetsDirectionTO_BACKEND, &flow)
		return true, s.loads.ended(&flow)
	}
	flow.Last -= relaid
	s.filter.addToBoth(&key)
	err = s.maps[packetsMapTranslations].Update(key, flow, ebpf.UpdateNoExist)
	s.filter.addToBoth(&key)
	if err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
		return false, fmt.Errorf("put a flow back: %w", err)
	}
	return false, nil
}

// unlay removes what follows from a flow.
func (s *sweep) unlay(key packetsTuple, flow *packetsTranslation) error {
	client, backend := flow.Src, flow.Dst
	own, err := s.dropBack(at(packetsHookEGRESS, key.Protocol, backend, client), key.Src, flow)
	if err == nil && flow.Port != 0 {
		// The way to the node's port says which address that is.
		var forth packetsTranslation
		hidden := at(packetsHookEGRESS, key.Protocol, client, backend)
		var known bool
		if known, err = s.look(hidden, &forth); known && own {
			_, err = s.dropBack(at(packetsHookINGRESS, key.Protocol, backend, forth.Src), client, flow)
			err = errors.Join(err, s.remove(hidden))
		}
	}
	if hook := directHook(flow.State); err == nil && own && hook != 0 {
		err = s.remove(at(hook, key.Protocol, client, backend))
	}
	return err
}

// directHook is where a flow has a translation from client to backend, if a client is answered directly.
func directHook(state packetsState) packetsHook {
	switch {
	case state&packetsStateDIRECT != 0:
		return packetsHookEGRESS
	case state&packetsStateTOLD != 0:
		return packetsHookINGRESS
	}
	return 0
}

// dropBack removes a way back that leads to a client, and not one that belongs to another flow by now.
func (s *sweep) dropBack(key packetsTuple, client packetsEndpoint, flow *packetsTranslation) (bool, error) {
	var t packetsTranslation
	if ok, err := s.look(key, &t); !ok || err != nil || t.Dst != client {
		return false, err
	}
	s.book(flow, packetsDirectionTO_CLIENT, &t)
	removed := s.removed
	err := s.remove(key)
	if s.removed > removed && isWayBack(key, &t) {
		s.shares.giveBack(t.owner(), uint32(t.Held&packetsHeldPLACES))
	}
	return true, err
}

// hasFlow says whether a translation follows from a flow that is there. See the picture in bpf/flows.h.
func (s *sweep) hasFlow(key packetsTuple, t *packetsTranslation) (bool, error) {
	backend, client := key.Src, key.Dst // of the way back to the client, translated
	direct := t.State&(packetsStateDIRECT|packetsStateTOLD) != 0
	switch {
	case direct:
		backend, client = key.Dst, key.Src
	case key.Hook == packetsHookINGRESS:
		client = t.Dst
	case t.State&packetsStateBACK == 0:
		backend, client = key.Dst, key.Src
	}
	_, flow, ok, err := s.flowOf(key.Protocol, backend, client)
	if !ok || err != nil || flow.Src != client || flow.Dst != backend {
		return false, err
	}
	return direct || key.Hook == packetsHookEGRESS || flow.Port == key.Dst.Port, nil
}

// flowOf finds the flow whose packets go back from a backend to a client, as the backend sees it.
func (s *sweep) flowOf(protocol uint8, backend, client packetsEndpoint) (
	key packetsTuple, flow packetsTranslation, ok bool, err error,
) {
	var back packetsTranslation
	if ok, err = s.look(at(packetsHookEGRESS, protocol, backend, client), &back); ok && err == nil {
		key = at(packetsHookINGRESS, protocol, back.Dst, back.Src)
		ok, err = s.look(key, &flow)
	}
	return key, flow, ok, err
}
