package kubernetes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// program is a part that can be started and stopped several times. Its output goes to a file named
// after it.
type program struct {
	path string
	dir  string
	args []string

	cmd   *exec.Cmd     // nil: it does not run
	ended chan struct{} // closed once cmd has ended
	err   error         // how it ended
}

func (p *program) name() string { return filepath.Base(p.path) }

func (p *program) logPath() string { return filepath.Join(p.dir, p.name()+".log") }

func (p *program) start() error {
	if p.cmd != nil {
		return fmt.Errorf("start %s: it runs already", p.name())
	}
	log, err := os.OpenFile(p.logPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(p.path, p.args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = p.dir, log, log
	// A group of its own: what the terminal sends to the test must not reach it before the test's end.
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL, Setpgid: true}
	started, ended := make(chan error), make(chan struct{})
	go func() {
		runtime.LockOSThread() // its end would kill the program: see Pdeathsig in prctl(2)
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		if started <- err; err == nil {
			p.err = cmd.Wait()
			close(ended)
		}
	}()
	if err := <-started; err != nil {
		return fmt.Errorf("start %s: %w", p.name(), err)
	}
	p.cmd, p.ended = cmd, ended
	return nil
}

// startReady starts the program and returns when ready no longer fails.
func (p *program) startReady(ctx context.Context, ready func(context.Context) error) error {
	if err := p.start(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, startPatience)
	defer cancel()
	for {
		err := ready(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-p.ended:
			return fmt.Errorf("%s ended: %w; its last words:\n%s", p.name(), p.err, p.lastWords())
		case <-ctx.Done():
			return fmt.Errorf("%s did not get ready: %w; its last words:\n%s", p.name(), err, p.lastWords())
		case <-time.After(20 * time.Millisecond): // no event announces it
		}
	}
}

// stopGrace is how long a program may take to stop before it is killed, as a kubelet does. An API server
// takes a minute for its watches.
const stopGrace = 3 * time.Second

// stop ends the program and returns when it has ended. One that does not run is left alone.
func (p *program) stop(kill bool) error {
	if p.cmd == nil {
		return nil
	}
	signal := unix.SIGTERM
	if kill {
		signal = unix.SIGKILL
	}
	if err := p.cmd.Process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop %s: %w", p.name(), err)
	}
	select {
	case <-p.ended:
	case <-time.After(stopGrace):
		_ = p.cmd.Process.Kill()
		<-p.ended
	}
	p.cmd = nil
	return nil
}

// lastWords are the end of its log.
func (p *program) lastWords() []byte {
	const lines = 20
	text, err := os.ReadFile(p.logPath())
	if err != nil {
		return []byte(err.Error())
	}
	all := bytes.Split(bytes.TrimSpace(text), []byte("\n"))
	return bytes.Join(all[max(0, len(all)-lines):], []byte("\n"))
}
