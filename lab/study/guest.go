package study

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/cluster"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
	"fairlead.dev/fairlead/lab/testbed/vm"
)

// GuestFlag names, on this program's command line in the test kernel, the file that says what to measure there.
const GuestFlag = "--guest"

// guestOrder is what is to be measured in the test kernel.
type guestOrder struct {
	Options
	Names   []string // of the experiments
	Kernels []Kernel
	Done    []Row // of all kernels: what is decided of another one is decided
	Last    stage
	// From says whose Services there are instead of generated ones, which are the Objects.
	From    string
	Objects []json.RawMessage
}

// word is one of the lines that come back: one of its fields.
type word struct {
	Kernel   *Kernel   `json:",omitempty"`
	Row      *Row      `json:",omitempty"`
	Missing  *Missing  `json:",omitempty"`
	Progress *Progress `json:",omitempty"`
	Said     string    `json:",omitempty"`
}

// inGuest reports whether a contender takes part in the test kernel: IPVS, and whom it is compared with.
func (c Contender) inGuest() bool {
	return c.Kind != Fairlead || slices.Contains([]string{ipvsPlane, nftablesPlane, legacyPlane}, c.Plane)
}

// lacksIPVS reports whether a contender that needs IPVS is missing here.
func (l *lab) lacksIPVS() bool {
	return slices.ContainsFunc(l.Contenders, func(c Contender) bool { return c.Plane == ipvsPlane && l.isMissing(c) })
}

// guestOptions are those of the run in the test kernel, which has one CPU, and not a fast one.
func (l *lab) guestOptions(until time.Time) Options {
	o := Options{
		Experiments: l.Experiments, Depth: l.Depth, Sizes: l.Sizes, Own: l.Own, Most: 4000, Rounds: l.Rounds,
		Judge: l.Judge, Budget: time.Until(until), Program: l.Program,
	}
	if l.Depth == Standard && len(o.Experiments) == len(Experiments()) {
		o.Experiments = slices.DeleteFunc(slices.Clone(o.Experiments), func(e Experiment) bool { return e.ForIPVS == nil })
	}
	if l.Own != nil {
		o.Most = max(o.Most, min(len(l.Own.services), 10_000))
	}
	for _, c := range l.Contenders {
		if c.inGuest() {
			o.Contenders = append(o.Contenders, c)
		}
	}
	return o
}

// repeat has this program measure in the test kernel. Rows come while it does.
func (l *lab) repeat(ctx context.Context, until time.Time, last stage) error {
	g := newLab(l.guestOptions(until), Test)
	g.journal, g.last, g.until = l.journal, last, until
	for g.judge(); len(g.present()) == 0; g.stage++ {
		if g.stage == last {
			return nil
		}
	}
	if time.Until(until) < time.Minute/2 {
		return nil
	}
	l.tell("starting the test kernel", task{})
	dir, err := os.MkdirTemp(vm.VisibleTemp(), "fairlead-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	file := filepath.Join(dir, "order")
	order, err := g.order()
	if err == nil {
		err = os.WriteFile(file, order, 0o644)
	}
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	listener := &listener{lab: l, cancel: cancel}
	var words bytes.Buffer
	status, err := vm.Machine{
		Args: []string{self, "bench", GuestFlag, file}, Stdout: listener, Stderr: &words, Kernel: l.TestKernel,
	}.Run(ctx)
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		return fmt.Errorf("the test kernel: %w", err)
	case status != 0:
		return fmt.Errorf("in the test kernel: %s", strings.TrimSpace(words.String()))
	}
	return nil
}

// order is the guestOrder for a run, as JSON.
func (l *lab) order() ([]byte, error) {
	o := guestOrder{
		Options: l.Options, Names: Names(l.Experiments), Kernels: l.journal.header.Kernels, Done: l.journal.rows,
		Last: l.last,
	}
	if l.Own == nil {
		return json.Marshal(o)
	}
	o.From = l.Own.from
	for _, object := range l.Own.objects(false) {
		text, err := kubernetes.EncodeJSON(object)
		if err != nil {
			return nil, err
		}
		o.Objects = append(o.Objects, text)
	}
	return json.Marshal(o)
}

// own are the Services that the order has.
func (o guestOrder) own() (*Own, error) {
	if o.From == "" {
		return nil, nil
	}
	var manifests []cluster.Manifest
	for _, text := range o.Objects {
		manifests = append(manifests, cluster.Manifest{Name: o.From, Data: text})
	}
	all, problems := cluster.Objects(manifests)
	if len(problems) > 0 {
		return nil, problems[0]
	}
	return NewOwn(o.From, all, string(testbed.Node))
}

// listener hears what comes from the test kernel.
type listener struct {
	lab    *lab
	cancel context.CancelCauseFunc
	line   []byte
}

// Write takes what has come, in pieces of any length.
func (h *listener) Write(b []byte) (int, error) {
	h.line = append(h.line, b...)
	for {
		i := bytes.IndexByte(h.line, '\n')
		if i < 0 {
			return len(b), nil
		}
		var w word
		err := json.Unmarshal(h.line[:i], &w)
		if err != nil {
			err = fmt.Errorf("the test kernel says %q: %w", h.line[:i], err)
		} else {
			err = h.hear(w)
		}
		if err != nil {
			h.cancel(err)
			return 0, err
		}
		h.line = h.line[i+1:]
	}
}

func (h *listener) hear(w word) error {
	l := h.lab
	switch {
	case w.Kernel != nil, w.Missing != nil:
		return l.journal.note(w)
	case w.Row != nil:
		l.failed = l.failed || w.Row.Failed != ""
		return l.journal.append(*w.Row)
	case w.Said != "":
		l.say("in the test kernel: " + w.Said)
	case w.Progress != nil && l.Progress != nil:
		p := *w.Progress
		p.Doing = "in the test kernel: " + p.Doing
		if p.Cell != "" {
			p.Cell = "in the test kernel: " + p.Cell
		}
		l.Progress(p)
	}
	return nil
}

// Guest is this program's work in the test kernel. It writes its findings to out, one line each.
func Guest(ctx context.Context, file string, judge func(*Result) Needs, out io.Writer) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var order guestOrder
	if err := json.Unmarshal(text, &order); err != nil {
		return err
	}
	o := order.Options
	o.Judge = judge
	if o.Experiments, err = Choose(order.Names); err != nil {
		return err
	}
	if o.Own, err = order.own(); err != nil {
		return err
	}
	to := json.NewEncoder(out)
	send := func(w word) { _ = to.Encode(w) } // fails only when the kernel is being ended
	o.Progress = func(p Progress) { send(word{Progress: &p}) }
	o.Say = func(what string) { send(word{Said: what}) }
	l := newLab(o, Test)
	l.send, l.last = send, order.Last
	dir, err := os.MkdirTemp("", "fairlead-bench-") // in the memory of this kernel
	if err != nil {
		return err
	}
	header := l.header(ctx)
	header.Kernels = append(order.Kernels, header.Kernels...)
	if l.journal, err = openJournal(dir, nil, header); err != nil {
		return err
	}
	for _, r := range order.Done {
		l.journal.keep(r)
	}
	l.remember()
	send(word{Kernel: &header.Kernels[len(order.Kernels)]})
	return errors.Join(l.measureAll(ctx), l.journal.file.Close())
}
