// Package study repeats, on this machine, the published comparisons of service proxies. It runs each data plane, and
// other proxies beside them, with the same Services, in namespaces of a testbed.
//
//	Experiments ─► cells: a case and a size ─► sites: a virtual cluster for each contender
//	     ┌► Needs: turns that would decide ─►    │ in each round a turn of each contender, in random order
//	     │                  journal, line by line ◄┘
//	     └─────────────────────── Result ─► medians, ratios to direct access with their bounds, exponents
//	                                             └► verdicts on what was published, advice, report
package study

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"time"
)

// Format is that of a Result's JSON. It grows when an older reader would misunderstand a newer file.
const Format = 1

// Depth is how much of the experiments is done.
type Depth string

const (
	// Standard has the sizes of the studies, but for the largest.
	Standard Depth = "standard"
	// Full is all of them with the largest sizes.
	Full Depth = "full"
)

// byDepth chooses a value by depth.
func byDepth[T any](d Depth, standard, full T) T {
	if d == Full {
		return full
	}
	return standard
}

// Result is what a run has found: each turn's figures as they were, and all that is needed to read them without this
// program.
type Result struct {
	Format   int       `json:"format"`
	Version  string    `json:"version"` // Fairlead's
	Depth    Depth     `json:"depth"`
	Started  time.Time `json:"started"`
	Ended    time.Time `json:"ended"`
	Complete bool      `json:"complete"` // false: it was interrupted, or something failed
	// Services says whose they are: "generated", or where they were read.
	Services    string        `json:"services"`
	Kernels     []Kernel      `json:"kernels"`
	Contenders  []Contender   `json:"contenders"`
	Missing     []Missing     `json:"missing,omitempty"` // what could not take part anywhere; there are no rows of that
	Experiments []Description `json:"experiments"`
	Rows        []Row         `json:"rows"`
}

// Kernel is one that measurements were made on. Figures of different kernels are never compared.
type Kernel struct {
	Name     string            `json:"name"`     // This or Test
	Release  string            `json:"release"`  // uname -r
	Note     string            `json:"note"`     // what a reader must know: that eBPF is interpreted there
	CPU      string            `json:"cpu"`      // model name
	CPUs     int               `json:"cpus"`     // that this process may use
	Memory   uint64            `json:"memory"`   // bytes
	Programs map[string]string `json:"programs"` // tool or rival → its version
}

// The names of kernels.
const (
	This = "this kernel"
	Test = "test kernel"
)

// Missing is a contender that cannot run on a kernel.
type Missing struct {
	Contender string `json:"contender"`
	Kernel    string `json:"kernel"`
	Why       string `json:"why"` // one line
}

// Kind is what part a contender has in a comparison.
type Kind string

const (
	// Direct is no proxy: its clients connect to the backends themselves. All ratios are to it.
	Direct Kind = "direct"
	// Again is Direct once more, on a node of its own: what differs between the two is chance.
	Again Kind = "again"
	// Fairlead is this program with one of its data planes.
	Fairlead Kind = "fairlead"
	// Peer is another program.
	Peer Kind = "peer"
)

// Contender is a data plane or proxy that is compared.
type Contender struct {
	Name  string `json:"name"` // unique: "direct", "ebpf", "kube-proxy iptables"
	Kind  Kind   `json:"kind"`
	Plane string `json:"plane,omitempty"` // or the peer's mode
	// To is the plane, or the peer's mode, that it changes to in the experiment about that.
	To string `json:"to,omitempty"`
	// Program is a peer's path.
	Program string `json:"program,omitempty"`
	// Note is what a reader must know of it: that it uses the older interface of iptables.
	Note string `json:"note,omitempty"`
	// Args are added to the proxy's own, as one scheduler or another.
	Args []string `json:"args,omitempty"`
	// Legacy has the programs iptables, iptables-save and so on, if the proxy runs them, be those of the older interface.
	Legacy bool `json:"legacy,omitempty"`
}

// Description is what an experiment is about.
type Description struct {
	Name    string   `json:"name"`
	Does    string   `json:"does"`   // a sentence
	Source  string   `json:"source"` // who published it, and where
	Axis    string   `json:"axis"`   // what a cell's size counts, "Services"; empty: nothing grows
	Figures []Figure `json:"figures"`
}

// Figure is something that is measured.
type Figure struct {
	Name string `json:"name"` // in Row.Figures
	Unit Unit   `json:"unit"`
	// Better is Lower, Higher, or empty for what is only told.
	Better Better `json:"better"`
	Does   string `json:"does"` // a few words for who reads a chart
	// Main is set for the figure by which an experiment's contenders are ranked: one for each experiment.
	Main bool `json:"main,omitempty"`
	// Margin is the part by which the figure may differ without mattering to anybody; 0: 5 %.
	Margin float64 `json:"margin,omitempty"`
}

// Matters is the factor from which on a difference does.
func (f Figure) Matters() float64 { return 1 + cmp.Or(f.Margin, 0.05) }

// Unit is one of seconds, bytes, bits per second, a rate per second, or a plain number.
type Unit string

// The units of figures.
const (
	Seconds   Unit = "s"
	Bytes     Unit = "B"
	BitRate   Unit = "bit/s"
	PerSecond Unit = "1/s"
	Count     Unit = ""
	Share     Unit = "%" // 1 is 100 %
)

// Better says which of two figures is the better one.
type Better string

// The values of Better.
const (
	Lower  Better = "lower"
	Higher Better = "higher"
)

// Figures are values by their names.
type Figures map[string]float64

// Turns are those of a contender in a cell.
type Turns struct {
	Experiment, Kernel, Case string
	Size                     int
	Contender                string
}

func (r Row) turns() Turns { return Turns{r.Experiment, r.Kernel, r.Case, r.Size, r.Contender} }

// Row is a contender's turn in a round of a cell.
type Row struct {
	Experiment string `json:"experiment"`
	Kernel     string `json:"kernel"`
	// Case tells an experiment's comparisons apart that are not of one curve: "last Service", "500 ms of delay".
	Case      string `json:"case,omitempty"`
	Size      int    `json:"size,omitempty"`
	Contender string `json:"contender"`
	// Round 1 is the first. 0 stands for all of the cell's that there are not: the contender had failed before.
	Round   int       `json:"round"`
	Figures Figures   `json:"figures,omitempty"`
	Failed  string    `json:"failed,omitempty"` // why there are no figures
	At      time.Time `json:"at"`
	Took    float64   `json:"took"` // seconds
}

// Read reads a result's file.
func Read(path string) (*Result, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var r Result
	if err := json.Unmarshal(text, &r); err != nil {
		return nil, fmt.Errorf("%s is no result of fairlead bench: %w", path, err)
	}
	if r.Format != Format {
		return nil, fmt.Errorf("%s has format %d; this Fairlead reads format %d", path, r.Format, Format)
	}
	return &r, nil
}
