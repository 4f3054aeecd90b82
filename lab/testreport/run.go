package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"fairlead.dev/fairlead/lab/lack"
)

// event is what go doc test2json describes. Events of builds have no package.
type event struct {
	Action, Package, Test, Output string
	Elapsed                       float64
}

// run is what has happened.
type run struct {
	packages map[string]*pkg
	passed   int
	skipped  []skip
}

// pkg is a package, of which tests that run have not ended yet.
type pkg struct {
	seconds                float64
	tested, cached, broken bool
	failed                 int
	running                map[string]int
	said                   map[string]string // the lack, by each test or, at "", by the program
}

type skip struct {
	pkg, test, reason string
	lack              lack.Lack // none, if the test does not say it as it should
}

func newRun() *run { return &run{packages: map[string]*pkg{}} }

func (r *run) read(in io.Reader) error {
	for d := json.NewDecoder(in); ; {
		var e event
		switch err := d.Decode(&e); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("this is not the output of go test -json: %w", err)
		case e.Package != "":
			e.Package = strings.TrimPrefix(e.Package, "fairlead.dev/fairlead/")
			r.add(r.pkg(e.Package), e)
		}
	}
}

func (r *run) pkg(name string) *pkg {
	p := r.packages[name]
	if p == nil {
		p = &pkg{running: map[string]int{}, said: map[string]string{}}
		r.packages[name] = p
	}
	return p
}

func (r *run) add(p *pkg, e event) {
	switch {
	case e.Action == "output":
		p.hear(e)
	case e.Action == "run":
		p.tested = true
		p.running[e.Test]++
	case e.Action != "pass" && e.Action != "fail" && e.Action != "skip":
	case e.Test == "":
		p.seconds, p.broken = e.Elapsed, e.Action == "fail"
		if p.said[""] != "" && e.Action == "pass" {
			r.skip(p, event{Package: e.Package, Test: "TestMain"}, p.said[""])
		}
	default:
		p.running[e.Test]--
		r.testEnds(p, e)
	}
}

func (r *run) testEnds(p *pkg, e event) {
	switch e.Action {
	case "pass":
		r.passed++
	case "fail":
		p.failed++
	case "skip":
		r.skip(p, e, p.said[e.Test])
	}
}

func (r *run) skip(p *pkg, e event, said string) {
	p.tested = true
	l, reason, _ := lack.Said(said)
	r.skipped = append(r.skipped, skip{e.Package, e.Test, reason, l})
}

func (p *pkg) hear(e event) {
	_, _, ok := lack.Said(e.Output)
	if ok && (e.Test != "" || strings.HasPrefix(e.Output, lack.AllSkipped)) {
		p.said[e.Test] = e.Output
	}
	p.cached = p.cached || strings.HasSuffix(e.Output, "\t(cached)\n")
}

// failed counts the tests that failed or have not ended, and the programs that did not compile, or ended badly
// although no test of theirs failed.
func (r *run) failed() (n int) {
	for _, p := range r.packages {
		failed := p.failed
		for _, running := range p.running {
			failed += running
		}
		if p.broken {
			failed = max(failed, 1)
		}
		n += failed
	}
	return n
}
