package attack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/traffic"
)

// Bounds of what an attack may do to others.
const (
	maxChange = time.Second
	maxMemory = 64 << 20
	maxLine   = 4 << 10   // of the log
	maxLogged = 256 << 10 // by one attack
	// slower is how many times as long as the control's slowest change one may take, where a second is not enough.
	slower = 5
	// busyChange and busyMemory are for runs in which the machine does other things as well: what takes longer was kept
	// waiting, and garbage is collected late.
	busyChange = 10 * time.Second
	busyMemory = 96 << 20
)

// untilTold is how long the agent may take to tell the owner of a refused object. It may still be programming large changes.
const untilTold = eventually.Taking(15 * time.Second)

// trial is an attack under way.
type trial struct {
	*stage
	attack  attack
	control *changes
	victim  *changes
	watch   *traffic.Watch
	quiet   *quiet
	health  *health
	memory  *memory
	began   time.Time
	logged  int // bytes, before
}

// verdict is what was found.
type verdict struct {
	wrong   []string
	change  change        // the slowest
	control time.Duration // of its changes the slowest at the same time
	memory  int64         // bytes more than before
	silence time.Duration // the victim's longest wait for an answer
}

// line has the figures; see figures.
func (v verdict) line(c cell) string {
	return fmt.Sprintf("figures: %s on %s: change %d ms (control %d ms), memory %+d MiB, longest wait %d ms, wrong %d",
		c.name, c.on, v.change.took.Milliseconds(), v.control.Milliseconds(), v.memory>>20, v.silence.Milliseconds(), len(v.wrong))
}

// try carries out an attack.
func (a attack) try(s *stage, control *changes) verdict {
	t := &trial{stage: s, attack: a, control: control}
	t.watch, t.quiet, t.victim = s.watch(), s.quiet(), s.change()
	t.victim.settle(2)
	t.health, t.memory = s.observeHealth(), s.observeMemory()
	t.began, t.logged = time.Now(), len(s.proxy.Log())
	a.act(s)
	t.victim.settle(2)
	wrong := t.named()
	if a.look != nil {
		wrong = append(wrong, a.look(s)...)
	}
	s.withdraw()
	t.victim.settle(3)
	v := t.judge()
	v.wrong = append(v.wrong, wrong...)
	return v
}

func (t *trial) judge() (v verdict) {
	add := func(format string, args ...any) { v.wrong = append(v.wrong, fmt.Sprintf(format, args...)) }
	v.change, v.control = t.victim.worst(t.began), t.control.worst(t.began).took
	limit := max(maxChange, slower*v.control)
	most := int64(maxMemory)
	if *figuresFile == "" {
		limit, most = max(limit, busyChange), busyMemory
	}
	if v.change.took > limit {
		add("a change of the victim: %s; the control's slowest took %s", v.change, v.control.Round(time.Millisecond))
	}
	v.wrong = append(v.wrong, t.quiet.resume()...)
	r := t.watch.Stop()
	v.silence = r.Total().Longest
	slow := limit > maxChange // and so may an answer be that is waited for no longer than a second
	if c := r.Total(); c.Bad() || c.Resent > t.overflown() && !slow || c.Answered == 0 {
		add("clients of the victim:\n%s", r)
	}
	for _, pod := range []testbed.Place{evil, lurker} {
		if n := r.Backends[string(pod)]; n > 0 {
			add("%s has answered %d clients of the victim", pod, n)
		}
	}
	if v.memory = t.memory.more(); v.memory > most {
		add("the process takes %d MiB more than before", v.memory>>20)
	}
	v.wrong = append(v.wrong, t.health.wrong(limit)...)
	if err := t.proxy.Check(); err != nil {
		add("%v", err)
	}
	v.wrong = append(v.wrong, t.spoke()...)
	return v
}

// overflown is how many datagrams have come to sockets of the node that were full, in mode userspace. There one socket
// takes the datagrams of all Services from an origin. While a flood leaves the process too little of the processor to
// empty it, the kernel drops those of any client (dataplane/internal/relay, receive.go). The victim may have lost no
// more than the kernel has dropped.
func (t *trial) overflown() (n int) {
	if t.on != userspace {
		return 0
	}
	list, err := t.run("cat", "/proc/net/udp", "/proc/net/udp6")
	if err != nil {
		t.Error(err)
	}
	const unconnected = "07" // others have the answers of one flow
	for line := range strings.Lines(list) {
		words := strings.Fields(line)
		if drops, err := strconv.Atoi(words[len(words)-1]); err == nil && words[3] == unconnected {
			n += drops
		}
	}
	return n
}

// named waits until the owners of refused objects are told.
func (t *trial) named() (wrong []string) {
	for _, name := range t.attack.told {
		err := untilTold.Poll(t.Context(), func() error {
			if log := t.proxy.Log()[t.logged:]; !strings.Contains(log, name) {
				return fmt.Errorf("the log does not name %s", name)
			}
			if status := t.status(); !strings.Contains(status, name) {
				return fmt.Errorf("fairlead status does not name %s:\n%s", name, status)
			}
			return nil
		})
		if err != nil {
			wrong = append(wrong, err.Error())
		}
	}
	return wrong
}

// spoke is what is wrong with the log: it is short, and text of others does not look like the process's own.
func (t *trial) spoke() (wrong []string) {
	log := t.proxy.Log()[t.logged:]
	if len(log) > maxLogged {
		wrong = append(wrong, fmt.Sprintf("the log has grown by %d KiB", len(log)>>10))
	}
	for line := range strings.Lines(log) {
		line = strings.TrimSuffix(line, "\n")
		unprintable := func(r rune) bool { return !unicode.IsPrint(r) }
		switch {
		case len(line) > maxLine:
			wrong = append(wrong, fmt.Sprintf("a line of %d bytes in the log: %.200s", len(line), line))
		case strings.ContainsFunc(line, unprintable) || !strings.HasPrefix(line, "time="):
			wrong = append(wrong, fmt.Sprintf("a line of others in the log: %.200q", line))
		}
	}
	return wrong
}

// health asks /livez all the time. The victim's changes are programmed within a second, or something else is wrong; so
// each answer must be 200.
type health struct {
	stop context.CancelFunc
	over chan struct{}
	bad  []string
	n    int
	// longest is the longest wait for an answer.
	longest time.Duration
}

func (s *stage) observeHealth() *health {
	ctx, stop := context.WithCancel(s.Context())
	h := &health{stop: stop, over: make(chan struct{})}
	go func() {
		defer close(h.over)
		pace := time.NewTicker(100 * time.Millisecond)
		defer pace.Stop()
		for ; ctx.Err() == nil; <-pace.C {
			begin := time.Now()
			_, err := s.page(ctx, healthz, "/livez")
			took := time.Since(begin)
			h.longest = max(h.longest, took)
			if h.n++; ctx.Err() == nil && err != nil {
				h.bad = append(h.bad, fmt.Sprintf("/livez after %s: %v", took.Round(time.Millisecond), err))
			}
		}
	}()
	s.Cleanup(h.end)
	return h
}

func (h *health) end() {
	h.stop()
	<-h.over
}

func (h *health) wrong(limit time.Duration) (wrong []string) {
	h.end()
	if len(h.bad) > 0 {
		wrong = append(wrong, fmt.Sprintf("%d of %d times: %s", len(h.bad), h.n, h.bad[0]))
	}
	if limit = max(limit, lost); h.longest > limit {
		wrong = append(wrong, fmt.Sprintf("/livez took %s, limit %s", h.longest, limit))
	}
	return wrong
}

// page asks from the node, as the kubelet does.
func (s *stage) page(ctx context.Context, at netip.AddrPort, path string) (body string, err error) {
	ctx, cancel := context.WithTimeout(ctx, givenUp)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+at.String()+path, nil)
	if err != nil {
		return "", err
	}
	response, err := s.bed.HTTPClient(testbed.Node).Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if response.StatusCode != http.StatusOK {
		err = errors.Join(err, errors.New(response.Status))
	}
	return string(text), err
}

// memory follows what the process takes: what is resident and, as that is not, its eBPF maps.
type memory struct {
	pid         int
	stop, over  chan struct{}
	once        sync.Once
	before, top int64
}

func (s *stage) observeMemory() *memory {
	m := &memory{pid: s.proxy.Pid(), stop: make(chan struct{}), over: make(chan struct{})}
	peak := "VmHWM" // of what follows
	if os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", m.pid), []byte("5"), 0) != nil {
		peak = "VmRSS" // what is seen now and then
	}
	maps := func() int64 { return 0 }
	if s.on == ebpf {
		maps = m.maps
	}
	m.before = m.resident("VmRSS") + maps()
	go func() {
		defer close(m.over)
		pace := time.NewTicker(50 * time.Millisecond)
		defer pace.Stop()
		for {
			select {
			case <-pace.C:
				m.top = max(m.top, m.resident("VmRSS")+maps())
			case <-m.stop:
				m.top = max(m.top, m.resident(peak)+maps())
				return
			}
		}
	}()
	s.Cleanup(m.end)
	return m
}

func (m *memory) end() {
	m.once.Do(func() { close(m.stop) })
	<-m.over
}

func (m *memory) more() int64 {
	m.end()
	return m.top - m.before
}

// resident is a field of the process's status, in bytes; 0 if it has ended.
func (m *memory) resident(name string) int64 {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", m.pid))
	n, _ := field(text, name)
	return n << 10
}

// maps is the memory of the maps that the process has open.
func (m *memory) maps() (sum int64) {
	dir, seen := fmt.Sprintf("/proc/%d/fdinfo/", m.pid), map[int64]bool{}
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		text, _ := os.ReadFile(dir + e.Name()) // it may be closed meanwhile
		id, is := field(text, "map_id")
		if n, _ := field(text, "memlock"); is && !seen[id] {
			seen[id] = true
			sum += n
		}
	}
	return sum
}

// field is a number in a file of /proc.
func field(text []byte, name string) (n int64, ok bool) {
	_, rest, ok := bytes.Cut(text, []byte(name+":"))
	if ok {
		_, err := fmt.Fscan(bytes.NewReader(rest), &n)
		ok = err == nil
	}
	return n, ok
}
