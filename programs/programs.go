// Package programs finds the programs of Fairlead that work together: the agent and the laboratory.
//
//	fairlead demo ──► Find("fairlead-lab") ──► the file beside this program, else the one in PATH
//
// Both are made from the same sources and installed together, so the one beside this program has its version.
package programs

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// The names of the programs.
const (
	Agent = "fairlead"       // serves a node, and has the commands that an operator types there
	Lab   = "fairlead-lab"   // demonstrates and measures, in virtual clusters
	Cases = "fairlead-cases" // plays the cases that each data plane passes: the tests of lab/conformance
)

// Find returns the absolute path of a program: the executable file of that name beside this program or, if there is
// none, the first one in PATH. Where there is neither, the error is a *Missing.
func Find(name string) (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find out where this program is, to look for %s beside it: %w", name, err)
	}
	dir := filepath.Dir(self)
	for _, candidate := range []string{filepath.Join(dir, name), name} {
		path, err := exec.LookPath(candidate)
		if err == nil {
			return filepath.Abs(path)
		}
		if !errors.Is(err, exec.ErrNotFound) && !errors.Is(err, os.ErrNotExist) {
			return "", fmt.Errorf("%s cannot be run: %w", candidate, err)
		}
	}
	return "", &Missing{Program: name, Dir: dir}
}

// Missing says that a program is not installed, and how to get it.
type Missing struct {
	Program string
	Dir     string // of this program
}

func (m *Missing) Error() string {
	image := m.Program
	if image == Cases {
		image = Lab
	}
	return fmt.Sprintf("%s is neither in %s nor in PATH; make it with \"./dev build\" from Fairlead's sources, "+
		"or take it from the image %s, and put it into one of them", m.Program, m.Dir, image)
}
