package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/spf13/pflag"

	"fairlead.dev/fairlead/config"
)

var (
	flagLine    = regexp.MustCompile(`^ +(-\w, )?--([\w-]+)( \S.*?)?(?:  .*)?$`)
	commandLine = regexp.MustCompile(`^  ([a-z-]+) +\S`)
	// offersJSON is the flag of a command whose output can be JSON.
	offersJSON = regexp.MustCompile(`(?m)^ +-o, --(?:output|format) .*\bjson\b`)
)

// helps reads the help of the programs.
type helps struct {
	program string // its file
	lines   []string
	json    []string // commands that print JSON if they are asked to
}

// commandLines compiles the programs, and returns their commands and flags, and the commands whose output can be JSON.
func commandLines() (lines, formats []string, err error) {
	dir, err := os.MkdirTemp("", "fairlead-stable-")
	if err != nil {
		return nil, nil, err
	}
	defer os.RemoveAll(dir)
	build := exec.Command("go", "build", "-buildvcs=false", "-o", dir+"/", module+"cmd/fairlead",
		module+"cmd/kubectl-fairlead", module+"lab/cmd/fairlead-lab")
	if out, err := build.CombinedOutput(); err != nil {
		return nil, nil, fmt.Errorf("compile the programs: %w\n%s", err, out)
	}
	var h helps
	for _, program := range []string{"fairlead", "kubectl-fairlead"} {
		h.program = filepath.Join(dir, program)
		if err := h.read([]string{strings.Replace(program, "-", " ", 1)}); err != nil {
			return nil, nil, err
		}
	}
	return append(h.lines, hidden()...), h.json, nil
}

// read lists a command, its flags, and the commands below it.
func (h *helps) read(command []string) error {
	out, err := exec.Command(h.program, append([]string{"help"}, command[1:]...)...).Output()
	if err != nil {
		return fmt.Errorf("help %v: %w", command, err)
	}
	name := strings.Join(command, " ")
	h.lines = append(h.lines, "command "+name)
	if offersJSON.Match(out) {
		h.json = append(h.json, name)
	}
	var below []string
	heading := ""
	for line := range strings.Lines(string(out)) {
		line = strings.TrimSuffix(line, "\n")
		switch {
		case line == "" || line[0] != ' ':
			heading = line
		case heading == "Available Commands:":
			if m := commandLine.FindStringSubmatch(line); m != nil && m[1] != "help" && m[1] != "completion" {
				below = append(below, m[1])
			}
		case heading != "Examples:" && heading != "Global Flags:": // which the command above has
			if m := flagLine.FindStringSubmatch(line); m != nil && m[2] != "help" {
				h.lines = append(h.lines, flagText(name, m[2], strings.Trim(m[1], "-, "), m[3] != ""))
			}
		}
	}
	for _, c := range below {
		if err := h.read(append(command[:len(command):len(command)], c)); err != nil {
			return err
		}
	}
	return nil
}

func flagText(command, name, short string, value bool) string {
	text := "flag " + command + " --" + name
	if short != "" {
		text += ", -" + short
	}
	if value {
		text += " VALUE"
	}
	return text
}

// hidden are flags of run that the help does not show, as kube-proxy or the release before had them.
func hidden() (lines []string) {
	set := pflag.NewFlagSet("", pflag.ContinueOnError)
	config.NewFlags("nftables").AddTo(set)
	set.VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Deprecated != "" {
			lines = append(lines, flagText("fairlead run", f.Name, f.Shorthand, f.NoOptDefVal == ""))
		}
	})
	return lines
}
