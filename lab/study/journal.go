package study

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/testbed"
)

// The files of a run's directory.
const (
	journalFile = "journal.jsonl" // a heading, and then words
	resultFile  = "result.json"
)

// journal is the file to which each row is appended when it is known: whatever ends the run, what it had found is
// there.
type journal struct {
	dir    string
	file   *os.File
	header heading
	rows   []Row
	done   map[Turns]*done
	// notes are by what they are about: a later one replaces an earlier one.
	notes  map[string]word
	synced time.Time // what was written until then outlives the machine
}

// journalForm grows when the lines of a journal change.
const journalForm = 2

// heading is the first line of a journal: the result without rows.
type heading struct {
	Form int `json:"journal"`
	// Args are those of the command that began the run.
	Args []string `json:"args,omitempty"`
	Result
}

// Arguments are those of the command that began the run in a directory.
func Arguments(dir string) ([]string, error) {
	f, err := os.Open(filepath.Join(dir, journalFile))
	if err != nil {
		return nil, fmt.Errorf("there is no run to continue: %w", err)
	}
	defer f.Close()
	var h heading
	if err := json.NewDecoder(f).Decode(&h); err != nil {
		return nil, fmt.Errorf("%s is no journal: %w", f.Name(), err)
	}
	return h.Args, nil
}

// done is what there is of a contender's turns in a cell.
type done struct {
	turns int
	last  int  // round
	over  bool // there will be no more: the contender had failed before
}

// openJournal opens that of a directory, or begins one.
func openJournal(dir string, args []string, header Result) (*journal, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make the directory for results (--output): %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, journalFile), os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("another fairlead bench writes to %s: wait for its end, or choose another "+
			"directory (--output): %w", dir, err), f.Close())
	}
	j := &journal{
		dir: dir, file: f, header: heading{journalForm, args, header}, done: map[Turns]*done{}, notes: map[string]word{},
	}
	if err := j.resume(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return j, nil
}

// resume reads what is there. A line that was not written to its end is cut off.
func (j *journal) resume() error {
	text, err := io.ReadAll(j.file)
	if err != nil {
		return err
	}
	whole := bytes.LastIndexByte(text, '\n') + 1
	if err := j.file.Truncate(int64(whole)); err != nil {
		return err
	}
	lines := bytes.Split(bytes.TrimSuffix(text[:whole], []byte("\n")), []byte("\n"))
	if whole == 0 {
		return j.write(j.header)
	}
	var before heading
	if err := json.Unmarshal(lines[0], &before); err != nil {
		return fmt.Errorf("%s is no journal: %w", j.file.Name(), err)
	}
	if other := before.differences(j.header); len(other) > 0 {
		return fmt.Errorf("%s holds a run with %s: choose another directory (--output), or delete this one", j.dir,
			strings.Join(other, ", "))
	}
	j.header.Started = before.Started
	for n, line := range lines[1:] {
		var w word
		if err := json.Unmarshal(line, &w); err != nil {
			return fmt.Errorf("%s, line %d: %w", j.file.Name(), n+2, err)
		}
		if w.Row != nil {
			j.keep(*w.Row)
		} else {
			j.notes[w.about()] = w
		}
	}
	return nil
}

// differences are why rows of one cannot stand beside those of the other.
func (r heading) differences(o heading) (all []string) {
	for _, d := range []struct {
		what string
		a, b any
	}{
		{"another form of journal", r.Form, o.Form},
		{"another version of Fairlead", r.Version, o.Version},
		{"another depth (" + string(r.Depth) + ")", r.Depth, o.Depth},
		{"other Services (" + r.Services + ")", r.Services, o.Services},
		{"another kernel or machine", r.Kernels, o.Kernels},
		{"other contenders", r.Contenders, o.Contenders},
		{"other experiments", r.Experiments, o.Experiments},
	} {
		a, errA := json.Marshal(d.a)
		b, errB := json.Marshal(d.b)
		if errA != nil || errB != nil || !bytes.Equal(a, b) {
			all = append(all, d.what)
		}
	}
	return all
}

func (j *journal) keep(r Row) {
	j.rows = append(j.rows, r)
	d := j.done[r.turns()]
	if d == nil {
		d = &done{}
		j.done[r.turns()] = d
	}
	d.turns, d.last, d.over = d.turns+1, max(d.last, r.Round), d.over || r.Round == 0
}

// of is what there is of a contender's turns.
func (j *journal) of(t Turns) done {
	if d := j.done[t]; d != nil {
		return *d
	}
	return done{}
}

// append writes a row to the disk.
func (j *journal) append(r Row) error {
	if err := j.write(word{Row: &r}); err != nil {
		return err
	}
	j.keep(r)
	return nil
}

// note writes what is known of the test kernel.
func (j *journal) note(w word) error {
	j.notes[w.about()] = w
	return j.write(w)
}

// about tells notes apart.
func (w word) about() string {
	if w.Missing != nil {
		return w.Missing.Contender
	}
	return ""
}

// write appends a line.
func (j *journal) write(v any) error {
	line, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if _, err := j.file.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("%w; what was found before is kept there", err)
	}
	if time.Since(j.synced) > time.Second {
		j.synced = time.Now()
		return j.file.Sync()
	}
	return nil
}

// result is all that is in the journal.
func (j *journal) result() *Result {
	r := j.header.Result
	r.Rows, r.Kernels = j.rows, slices.Clone(r.Kernels)
	for _, about := range slices.Sorted(maps.Keys(j.notes)) {
		switch w := j.notes[about]; {
		case w.Kernel != nil:
			r.Kernels = append(r.Kernels, *w.Kernel)
		case w.Missing != nil:
			r.Missing = append(r.Missing, *w.Missing)
		}
	}
	return &r
}

// write replaces the result's file.
func (r *Result) write(dir string) error {
	text, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return err
	}
	return testbed.ReplaceFile(filepath.Join(dir, resultFile), append(text, '\n'), 0o644)
}
