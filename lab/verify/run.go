package verify

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

	"fairlead.dev/fairlead/lab/demo"
	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/programs"
)

// Options say what to verify.
type Options struct {
	Kernel   string   // a version of Debian's, a kernel for amd64, or a User-Mode Linux; empty: this machine's
	Modules  string   // of a kernel for amd64: its directory /lib/modules/RELEASE
	Modes    []string // the planes that the node needs; empty: all are tried, the node needs that of Config
	Files    []string // manifests; none: a small shop that has each feature
	Config   string   // the node's KubeProxyConfiguration; a FairleadConfiguration may be beside it
	Progress func(doing string, n, of int)
}

// ErrUsage is wrapped by errors about Options.
var ErrUsage = errors.New("bad input")

// Run verifies a kernel. An error says why that could not be done.
func Run(ctx context.Context, o Options) (r Report, err error) {
	if o.Kernel != "" && !slices.Contains(vm.Debian, o.Kernel) {
		if info, err := os.Stat(o.Kernel); err != nil || !info.Mode().IsRegular() {
			return r, fmt.Errorf("%w: --kernel %s: neither a file nor one of %s",
				ErrUsage, o.Kernel, strings.Join(vm.Debian, ", "))
		}
		if o.Modules == "" && !userMode(o.Kernel) {
			return r, fmt.Errorf("%w: --kernel %s: a file needs --modules, its directory /lib/modules/RELEASE",
				ErrUsage, o.Kernel)
		}
	}
	dir, err := os.MkdirTemp(vm.VisibleTemp(), "fairlead-verify-")
	if err != nil {
		return r, err
	}
	defer os.RemoveAll(dir)
	data := filepath.Join(dir, "testdata") // whose name the script old knows
	if err := os.Mkdir(data, 0o755); err != nil {
		return r, err
	}
	mode, err := pack(data, o)
	if err != nil {
		return r, fmt.Errorf("%w: %w", ErrUsage, err)
	}
	modes, needed := o.Modes, o.Modes
	if len(modes) == 0 {
		modes, needed = demo.Modes(), []string{mode}
	}
	l := &listener{progress: o.Progress, modes: modes}
	if err := o.boot(ctx, dir, modes, l); err != nil {
		return r, err
	}
	if len(l.planes) < len(modes) {
		return r, fmt.Errorf("the kernel has ended before mode %s was tried; it has printed\n%s",
			modes[len(l.planes)], l.other.Bytes())
	}
	return judge(l.planes, needed), nil
}

// boot has the guest try the modes.
func (o Options) boot(ctx context.Context, dir string, modes []string, l *listener) error {
	data := filepath.Join(dir, "testdata")
	if o.Kernel == "" {
		l.doing("this machine's kernel")
		return Guest(ctx, data, modes, l)
	}
	lab, err := os.Executable()
	if err != nil {
		return err
	}
	l.doing("booting Linux " + o.Kernel)
	args := []string{"verify", "--guest", data, "--proxy-mode", strings.Join(modes, ",")}
	var status int
	if userMode(o.Kernel) {
		kernel, err := filepath.Abs(o.Kernel)
		if err != nil {
			return err
		}
		status, err = vm.Machine{Args: append([]string{lab}, args...), Stdout: l, Stderr: l, Kernel: kernel}.Run(ctx)
		return l.ended(status, err)
	}
	for _, name := range []string{programs.Lab, programs.Agent, programs.Cases} {
		from, err := programs.Find(name)
		if err != nil {
			return fmt.Errorf("%w: %w", ErrUsage, err)
		}
		if err := copyProgram(from, filepath.Join(data, name)); err != nil {
			return err
		}
	}
	script := filepath.Join(dir, "start")
	args[2] = emulated
	text := "#!/bin/sh\ncd testdata && exec ./" + programs.Lab + " " + strings.Join(args, " ") + "\n"
	if err := os.WriteFile(script, []byte(text), 0o755); err != nil { //nolint:gosec // a program
		return err
	}
	status, err = vm.Emulated{
		Kernel: o.Kernel, Modules: o.Modules, Dir: dir, Args: []string{script}, Stdout: l, Stderr: l,
	}.Run(ctx)
	return l.ended(status, err)
}

// userMode reports whether a kernel is a program.
func userMode(file string) bool {
	f, err := os.Open(file)
	if err != nil {
		return false
	}
	defer f.Close()
	magic := make([]byte, 4)
	_, err = io.ReadFull(f, magic)
	return err == nil && string(magic) == "\x7fELF"
}

func copyProgram(from, to string) error {
	r, err := os.Open(from)
	if err != nil {
		return err
	}
	defer r.Close()
	w, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY, 0o755) //nolint:gosec // a program
	if err != nil {
		return err
	}
	_, err = io.Copy(w, r)
	return errors.Join(err, w.Close())
}

// listener reads what a guest prints.
type listener struct {
	progress func(string, int, int)
	modes    []string
	planes   []Plane
	rest     []byte       // of an unfinished line
	other    bytes.Buffer // lines about no plane
}

func (l *listener) Write(b []byte) (int, error) {
	l.rest = append(l.rest, b...)
	for {
		before, after, ok := bytes.Cut(l.rest, []byte("\n"))
		if !ok {
			return len(b), nil
		}
		l.rest = bytes.Clone(after)
		l.line(bytes.TrimSpace(before))
	}
}

func (l *listener) line(text []byte) {
	about, ok := bytes.CutPrefix(text, []byte(line))
	var p Plane
	if !ok || json.Unmarshal(about, &p) != nil {
		if len(text) > 0 {
			l.other.Write(append(text, '\n'))
		}
		return
	}
	l.planes = append(l.planes, p)
	l.doing("Linux " + p.Release)
}

func (l *listener) doing(where string) {
	n := len(l.planes)
	if l.progress != nil && n < len(l.modes) {
		l.progress(fmt.Sprintf("%s: mode %s", where, l.modes[n]), n, len(l.modes))
	}
}

// ended makes an error of a guest that did not come to its end.
func (l *listener) ended(status int, err error) error {
	if err != nil || status != 0 {
		return errors.Join(err, fmt.Errorf("the guest has ended with status %d, and has printed\n%s", status,
			l.other.Bytes()))
	}
	return nil
}
