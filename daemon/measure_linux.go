package daemon

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/programs"
)

// Mode auto has the laboratory measure in a process of its own:
//
//	State ─► rows on its standard input ─┐
//	Config ─► two files without a name ──┴─► fairlead-lab recommend, on one processor ─► JSON ─► choice
const (
	// calibration is for how long planes are measured before one is chosen. A node that was just started serves no Service
	// meanwhile, unless kube-proxy's rules are still there: it must be short.
	calibration = 2500 * time.Millisecond
	// measureLimit ends a laboratory that hangs, or that the machine is too busy for.
	measureLimit = 10 * time.Second
	// cleanLimit is what the laboratory has to remove its namespaces after it was told to end.
	cleanLimit = 5 * time.Second
)

// choice is what fairlead-lab recommend prints, as far as the daemon goes by it.
type choice struct {
	Plane string   `json:"plane"` // empty: none can run here
	Next  []string `json:"next"`  // the others that can run, the best first
	Why   string   `json:"why"`   // a paragraph
}

// unmeasured is the choice where there are no measurements: the first plane that can be opened.
func unmeasured(reason error) *choice {
	all := Planes()
	return &choice{
		Plane: all[0], Next: all[1:],
		Why: fmt.Sprintf("%s, the first of %s that can be opened, as nothing was measured: %v",
			all[0], strings.Join(all, ", "), reason),
	}
}

// measure asks the laboratory. userspace is the last in any case, and not worth the time.
func (d *Daemon) measure(ctx context.Context, s *model.State) (*choice, error) {
	lab, err := programs.Find(programs.Lab)
	if err != nil {
		return nil, err
	}
	files, err := configFiles(d.config.Load())
	if err != nil {
		return nil, err
	}
	planes := slices.DeleteFunc(Planes(), func(name string) bool { return name == userspacePlane })
	c := &child{
		path: lab, stdin: s.String(), files: files,
		args: []string{
			"recommend", "--rows", "-", "--output", "json", "--duration", calibration.String(),
			"--planes", strings.Join(planes, ","), "--config", childFile(0), "--fairlead-config", childFile(1),
		},
	}
	var found choice
	if err := c.run(ctx, &found, d.node.measured.Go); err != nil {
		return nil, fmt.Errorf("%s recommend: %w", lab, err)
	}
	return &found, nil
}

// configFiles are the configuration for another process. They have no name, as a container may have no directory that
// can be written to.
func configFiles(c *config.Config) (files []*os.File, err error) {
	for _, kind := range []string{config.KubeProxyKind, config.FairleadKind} {
		text, err := c.Document(kind)
		if err != nil {
			return nil, errors.Join(err, closeAll(files))
		}
		fd, err := unix.MemfdCreate(kind, unix.MFD_CLOEXEC)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("a file for the %s: %w", kind, err), closeAll(files))
		}
		file := os.NewFile(uintptr(fd), kind)
		files = append(files, file)
		if _, err := file.Write(text); err != nil {
			return nil, errors.Join(err, closeAll(files))
		}
	}
	return files, nil
}

func closeAll(files []*os.File) error {
	var errs []error
	for _, file := range files {
		errs = append(errs, file.Close())
	}
	return errors.Join(errs...)
}

// childFile is what a child calls the file of an index: the first three are its standard streams.
func childFile(index int) string { return fmt.Sprintf("/proc/self/fd/%d", 3+index) }

// child is a process that answers in JSON, bounded in time and to one processor.
type child struct {
	path  string
	args  []string
	stdin string
	files []*os.File // closed when the process has ended
	said  bytes.Buffer
}

// run returns when there is an answer, or there will be none. The process may clean up for some time after that;
// background is given what waits for it.
func (c *child) run(ctx context.Context, answer any, background func(func())) error {
	ctx, cancel := context.WithTimeoutCause(ctx, measureLimit, fmt.Errorf("no answer within %s", measureLimit))
	out, in, err := os.Pipe()
	if err != nil {
		cancel()
		return errors.Join(err, closeAll(c.files))
	}
	defer out.Close()
	ended := make(chan error, 1)
	background(func() {
		defer cancel()
		err := c.wait(ctx, in)
		ended <- cmp.Or(context.Cause(ctx), err) // that time was up explains the exit status, if it was
		_ = errors.Join(in.Close(), closeAll(c.files))
	})
	answered := make(chan error, 1)
	go func() { answered <- json.NewDecoder(out).Decode(answer) }()
	select {
	case err = <-answered:
		if err == nil {
			return nil
		}
		err = cmp.Or(<-ended, err) // there is nothing more to read: it ends, or answers nonsense
	case err = <-ended: // a child of the process may still hold the pipe open
		_ = out.SetReadDeadline(time.Now().Add(time.Second))
		failed := <-answered
		if failed == nil {
			return nil
		}
		err = cmp.Or(err, failed)
	}
	if said := strings.TrimSpace(c.said.String()); said != "" {
		return fmt.Errorf("%w: %s", err, said)
	}
	return err
}

// wait starts the process and waits for its end. The thread ends with the calling goroutine, as it stays on one
// processor.
func (c *child) wait(ctx context.Context, out *os.File) error {
	runtime.LockOSThread()
	if err := stayOnOneCPU(); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, c.path, c.args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(c.stdin), out, &c.said
	cmd.ExtraFiles = c.files
	// Ctrl-C is for the daemon, which passes it on to the whole group.
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGTERM, Setpgid: true}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGTERM) }
	cmd.WaitDelay = cleanLimit
	return cmd.Run()
}

// stayOnOneCPU binds the calling thread, and the processes that it starts, to the last processor that it may use: the
// first one has most interrupts.
func stayOnOneCPU() error {
	var may, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &may); err != nil {
		return fmt.Errorf("list the processors: %w", err)
	}
	for cpu := len(may) * 64; cpu >= 0; cpu-- {
		if may.IsSet(cpu) {
			one.Set(cpu)
			break
		}
	}
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		return fmt.Errorf("stay on one processor: %w", err)
	}
	return nil
}
