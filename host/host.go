// Package host sets what kube-proxy sets on a machine beside its rules: how many connections the kernel tracks, and for
// how long. And it sets how unlikely the kernel is to kill this process when memory runs out.
//
//	Settings ─► wishes ─► Apply: read, and write what differs ─► /proc/sys/net/netfilter
//	                                     │                       /sys/module/nf_conntrack, /proc/self
//	                                     └─► Report: what changed, what could not be changed, and why
//
// Settings that have the wanted value are not written. So a process without the right to write finds nothing to do if
// it starts after one that had the right ("fairlead run --init-only").
package host

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/utils/cpuset"
)

// Settings are kube-proxy's, in its words, and Accounting. Zero, false and nil leave a setting unchanged.
type Settings struct {
	// MaxPerCore times the number of CPUs that are online, at least Min and never more than a million,
	// becomes nf_conntrack_max, unless that is greater: kube-proxy lowers it (kubernetes/kubernetes issue 142035).
	MaxPerCore, Min int
	TCPEstablished  time.Duration // nf_conntrack_tcp_timeout_established
	TCPCloseWait    time.Duration // nf_conntrack_tcp_timeout_close_wait
	TCPBeLiberal    bool          // nf_conntrack_tcp_be_liberal
	UDP             time.Duration // nf_conntrack_udp_timeout
	UDPStream       time.Duration // nf_conntrack_udp_timeout_stream
	Accounting      bool          // nf_conntrack_acct: packets and bytes of each connection are counted
	OOMScoreAdj     *int          // of this process
}

// maxTracked bounds what MaxPerCore makes of many cores: the table takes memory.
const maxTracked = 1 << 20

// Host is a machine, as files.
type Host struct {
	Root string // where /proc and /sys are; empty: /
}

// Report is what Apply did.
type Report struct {
	Changed []Change
	Failed  []Failure
}

// Change is a value that was written.
type Change struct{ Name, From, To string }

// Failure is a value that could not be written, or read.
type Failure struct {
	Change
	Err      error
	Optional bool // it only makes things better, and kube-proxy too says nothing
}

// wish is a value that a file should have.
type wish struct {
	name     string
	path     string
	value    int
	atLeast  bool // more is as good
	optional bool
}

// Apply gives the machine the settings, in the network namespace of the calling thread. One that fails
// does not keep the others from being tried.
func (h Host) Apply(s Settings) (r Report) {
	for _, w := range h.wishes(s) {
		change, err := h.fulfil(w)
		switch {
		case err != nil:
			r.Failed = append(r.Failed, Failure{change, err, w.optional})
		case change != Change{}:
			r.Changed = append(r.Changed, change)
		}
	}
	return r
}

func (h Host) wishes(s Settings) []wish {
	var all []wish
	conntrack := func(name string, value int) {
		if value > 0 {
			name = "nf_conntrack_" + name
			all = append(all, wish{
				name: name, path: "proc/sys/net/netfilter/" + name, value: value, atLeast: name == "nf_conntrack_max",
			})
		}
	}
	tracked := h.tracked(s)
	conntrack("max", tracked)
	if tracked > 0 { // lists of four entries are found fast
		all = append(all, wish{name: "hashsize of nf_conntrack", path: "sys/module/nf_conntrack/parameters/hashsize",
			value: tracked / 4, atLeast: true})
	}
	conntrack("tcp_timeout_established", seconds(s.TCPEstablished))
	conntrack("tcp_timeout_close_wait", seconds(s.TCPCloseWait))
	if s.TCPBeLiberal {
		conntrack("tcp_be_liberal", 1)
	}
	if s.Accounting {
		conntrack("acct", 1)
	}
	conntrack("udp_timeout", seconds(s.UDP))
	conntrack("udp_timeout_stream", seconds(s.UDPStream))
	if s.OOMScoreAdj != nil {
		all = append(all, wish{name: "oom_score_adj", path: "proc/self/oom_score_adj", value: *s.OOMScoreAdj, optional: true})
	}
	return all
}

func seconds(d time.Duration) int { return int(d / time.Second) }

// tracked is how many connections the kernel shall track; 0: as many as it does.
func (h Host) tracked(s Settings) int {
	if s.MaxPerCore <= 0 {
		return 0
	}
	if n := s.MaxPerCore * h.cpus(); n > s.Min || n > maxTracked {
		return min(n, maxTracked)
	}
	return s.Min
}

// cpus counts those of the machine. runtime.NumCPU counts those that this process may use.
func (h Host) cpus() int {
	if text, err := h.read("sys/devices/system/cpu/online"); err == nil {
		if set, err := cpuset.Parse(text); err == nil && set.Size() > 0 {
			return set.Size()
		}
	}
	return runtime.NumCPU()
}

func (h Host) path(path string) string { return filepath.Join(cmp.Or(h.Root, "/"), path) }

func (h Host) read(path string) (string, error) {
	text, err := os.ReadFile(h.path(path))
	return strings.TrimSpace(string(text)), err
}

// fulfil returns what it changed, or failed to change.
func (h Host) fulfil(w wish) (Change, error) {
	have, err := h.read(w.path)
	c := Change{w.name, have, strconv.Itoa(w.value)}
	if err != nil {
		return c, err
	}
	if n, err := strconv.Atoi(have); err == nil && (n == w.value || w.atLeast && n > w.value) {
		return Change{}, nil
	}
	err = os.WriteFile(h.path(w.path), []byte(c.To), 0o644)
	info, gone := os.Stat(h.path(w.path))
	readable := gone == nil && info.Mode().Perm()&0o222 == 0 // as the kernel shows nf_conntrack_max elsewhere
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, os.ErrPermission) && readable {
		err = fmt.Errorf("%w: %w", errNamespace, err)
	}
	return c, err
}

// errNamespace is wrapped by failures to change in another network namespace what only the first one can.
var errNamespace = errors.New("not in this network namespace")

// OnlyNamespace reports whether all that an administrator has to know is that this is not the machine's own network
// namespace.
func (r Report) OnlyNamespace() bool {
	return !slices.ContainsFunc(r.Failed, func(f Failure) bool { return !f.Optional && !errors.Is(f.Err, errNamespace) })
}

// Err is what of the Failures an administrator has to know, with what to do about it; nil: nothing.
func (r Report) Err() error {
	wishes, causes := map[string][]string{}, []string{}
	for _, f := range r.Failed {
		if f.Optional {
			continue
		}
		cause := f.cause()
		if wishes[cause] == nil {
			causes = append(causes, cause)
		}
		wishes[cause] = append(wishes[cause], f.String())
	}
	var errs []error
	for _, cause := range causes {
		errs = append(errs, fmt.Errorf("cannot set %s: %s", strings.Join(wishes[cause], ", "), cause))
	}
	return errors.Join(errs...)
}

func (c Change) String() string {
	if c.From == "" {
		return fmt.Sprintf("%s to %s", c.Name, c.To)
	}
	return fmt.Sprintf("%s to %s (it is %s)", c.Name, c.To, c.From)
}

// cause says why, and what to do.
func (f Failure) cause() string {
	switch {
	case errors.Is(f.Err, unix.EROFS):
		return "/proc/sys is mounted read-only here. Run once with --init-only in a privileged container, or set it on " +
			"the machine with sysctl -w; conntrack.maxPerCore: 0 and timeouts of 0s leave it as it is"
	case errors.Is(f.Err, unix.ENOENT):
		return "this kernel does not track connections yet; modprobe nf_conntrack"
	case errors.Is(f.Err, errNamespace):
		return "only the machine's own network namespace can change it. Run once with --init-only there; " +
			"conntrack.maxPerCore: 0 leaves it as it is"
	case errors.Is(f.Err, unix.EACCES), errors.Is(f.Err, unix.EPERM):
		return "this needs root. Run once with --init-only as root; conntrack.maxPerCore: 0 and timeouts of 0s leave it " +
			"as it is"
	}
	return f.Err.Error()
}
