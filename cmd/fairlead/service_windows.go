package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/windows/svc"
	"golang.org/x/sys/windows/svc/eventlog"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/daemon"
	"fairlead.dev/fairlead/programs"
)

const (
	// pendingHint is how soon the service manager hears again of a service that begins.
	pendingHint = 10 * time.Second
	// longestStart bounds the time for which a service begins: meanwhile Windows does not let it be stopped.
	longestStart = 2 * time.Minute
)

// isService reports whether the service manager has started this process, or a flag says so.
func isService(flags *config.Flags) bool {
	is, err := svc.IsWindowsService()
	return is && err == nil || flags.Lookup("windows-service").Value.String() == "true"
}

// serve runs the daemon: as a service, or for a console.
func serve(ctx context.Context, flags *config.Flags, o daemon.Options) error {
	if !isService(flags) {
		return daemon.Run(ctx, o)
	}
	s := &managed{context: ctx, options: o}
	if err := svc.Run(programs.Agent, s); err != nil {
		return fmt.Errorf("the service manager of Windows has not started this process (--windows-service): %w", err)
	}
	return s.failure
}

// managed is the daemon as a service.
type managed struct {
	context context.Context
	options daemon.Options
	failure error
}

// Execute implements svc.Handler. The service begins until its rules are in force.
func (s *managed) Execute(_ []string, requests <-chan svc.ChangeRequest, states chan<- svc.Status) (bool, uint32) {
	ctx, stop := context.WithCancel(s.context)
	defer stop()
	began, ended := make(chan struct{}), make(chan error, 1)
	s.options.InForce = func() { close(began) }
	go func() { ended <- daemon.Run(ctx, s.options) }()
	pending := svc.Status{State: svc.StartPending, WaitHint: uint32(pendingHint.Milliseconds())}
	running := svc.Status{State: svc.Running, Accepts: svc.AcceptStop | svc.AcceptShutdown}
	again, late := time.NewTicker(pendingHint/2), time.After(longestStart)
	defer again.Stop()
	for state := pending; ; {
		states <- state
		select {
		case <-began:
			state, began, late = running, nil, nil
		case <-late:
			state = running
		case <-again.C:
			if state.State != svc.Running {
				state.CheckPoint++
			}
		case r := <-requests:
			if r.Cmd == svc.Stop || r.Cmd == svc.Shutdown {
				state, began, late = svc.Status{State: svc.StopPending, WaitHint: pending.WaitHint}, nil, nil
				stop()
			}
		case s.failure = <-ended:
			if s.failure == nil {
				return false, 0
			}
			s.options.Logs.Logger().Error("the service has failed", "error", s.failure)
			return true, 1
		}
	}
}

// standardLog is where the log goes that no file takes: that of events in a service, which has no other output.
func standardLog(flags *config.Flags) (io.Writer, error) {
	if !isService(flags) {
		return os.Stderr, nil
	}
	const all = eventlog.Error | eventlog.Warning | eventlog.Info
	_ = eventlog.InstallAsEventCreate(programs.Agent, all) // fails if that was done before
	log, err := eventlog.Open(programs.Agent)
	return events{log}, err
}

// events has an event for each line of the log.
type events struct{ *eventlog.Log }

// Write implements io.Writer.
func (e events) Write(line []byte) (int, error) {
	const id = 1
	_, level, _ := bytes.Cut(line, []byte("level"))
	level = bytes.TrimLeft(level, `=":`)
	write := e.Info
	switch {
	case bytes.HasPrefix(level, []byte("ERROR")):
		write = e.Error
	case bytes.HasPrefix(level, []byte("WARN")):
		write = e.Warning
	}
	return len(line), write(id, strings.TrimRight(string(line), "\n"))
}
