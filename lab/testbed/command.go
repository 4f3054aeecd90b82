package testbed

import (
	"bytes"
	"context"
	"os/exec"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Cmd is an exec.Cmd that starts in the network namespace of a place. It is killed when the Bed is
// closed, its pod removed, or this process ends in whatever way.
type Cmd struct {
	*exec.Cmd
	host *host
	err  error
}

// Command prepares a command, which is killed when ctx ends. A wrong place is an error of Start.
func (b *Bed) Command(ctx context.Context, place Place, name string, args ...string) *Cmd {
	c := &Cmd{Cmd: exec.CommandContext(ctx, name, args...)}
	c.host, c.err = b.host(place)
	c.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	c.WaitDelay = 10 * time.Second // for grandchildren that keep its output open
	return c
}

// Start starts the command. The thread that does it, and whose end kills it, is the place's own.
func (c *Cmd) Start() error {
	if c.err != nil {
		return c.err
	}
	return c.host.at(c.Cmd.Start)
}

// Run starts the command and waits for its end.
func (c *Cmd) Run() error {
	if err := c.Start(); err != nil {
		return err
	}
	return c.Wait()
}

// Output runs the command and returns its standard output. Unlike exec.Cmd's, its errors do not hold
// the standard error: set Stderr to have it.
func (c *Cmd) Output() ([]byte, error) {
	var out bytes.Buffer
	c.Stdout = &out
	err := c.Run()
	return out.Bytes(), err
}

// CombinedOutput runs the command and returns its standard output and standard error.
func (c *Cmd) CombinedOutput() ([]byte, error) {
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	err := c.Run()
	return out.Bytes(), err
}

// Output keeps what a program writes. It can be read while the program runs.
type Output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (o *Output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(b)
}

func (o *Output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}
