package traffic

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/rpc"
	"net/rpc/jsonrpc"
	"os"
	"runtime/debug"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// variable is set in the environment of workers.
	variable    = "FAIRLEAD_TRAFFIC_WORKER"
	serviceName = "Worker"
)

// none is that nothing is asked, or answered.
type none = struct{} // net/rpc wants no type that only this package knows

// Main is all of a process's life, if StartWorker has started it; otherwise it does nothing. It stands before
// everything else in main and TestMain.
func Main() {
	if os.Getenv(variable) == "" {
		return
	}
	if err := work(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func work() error {
	raiseFiles()
	debug.SetGCPercent(400) // memory is there, and collecting is noise
	server := rpc.NewServer()
	if err := server.RegisterName(serviceName, &service{jobs: map[int]*job{}}); err != nil {
		return err
	}
	server.ServeCodec(jsonrpc.NewServerCodec(parent{}))
	return nil
}

// parent is the process that started this one, which ends with it: unfinished work is dropped.
type parent struct{}

func (parent) Read(b []byte) (int, error) {
	n, err := os.Stdin.Read(b)
	if errors.Is(err, io.EOF) {
		os.Exit(0)
	}
	return n, err
}

func (parent) Write(b []byte) (int, error) { return os.Stdout.Write(b) }
func (parent) Close() error                { return nil }

// raiseFiles has this process open as many files as the system allows.
func raiseFiles() {
	const most = 1 << 20 // fs.nr_open of most systems
	if unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: most, Max: most}) == nil {
		return
	}
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &l) == nil {
		_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: l.Max, Max: l.Max}) // it always may
	}
}

// needFiles reports that there cannot be so many connections or ports.
func needFiles(n int) error {
	const own = 64 // of the runtime, and what is open already
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return os.NewSyscallError("getrlimit", err)
	}
	if most := int(min(l.Cur, math.MaxInt32)) - own; n > most {
		return fmt.Errorf("%d connections or ports need as many open files, and this process may have %d: raise it "+
			"(ulimit -n) or run as root", n, most)
	}
	return nil
}

// service is what a worker does. Its methods are those of net/rpc.
type service struct {
	mu    sync.Mutex
	last  int
	jobs  map[int]*job
	ports []*port
}

// job is a Load under way.
type job struct {
	stop   context.CancelFunc
	ended  chan struct{}
	result Result
}

// Serve is Worker.Serve.
func (s *service) Serve(what Server, _ *none) error {
	if err := needFiles(len(what.Ports)); err != nil {
		return err
	}
	ports, err := what.listen()
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ports = append(s.ports, ports...)
	return nil
}

// Served is Worker.Served.
func (s *service) Served(_ none, counts *map[uint16]Served) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	*counts = map[uint16]Served{}
	for _, p := range s.ports {
		sum := (*counts)[p.number]
		sum.add(p)
		(*counts)[p.number] = sum
	}
	return nil
}

// Shut is Worker.Shut.
func (s *service) Shut(none, *none) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return shut(s.ports)
}

// Begin is Worker.Begin: it answers with the number of the job.
func (s *service) Begin(l Load, number *int) error {
	l, err := l.withDefaults()
	if err != nil {
		return err
	}
	if err := needFiles(l.files()); err != nil {
		return err
	}
	ctx, stop := context.WithCancel(context.Background())
	j := &job{stop: stop, ended: make(chan struct{})}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last++
	*number = s.last
	s.jobs[s.last] = j
	go func() {
		defer close(j.ended)
		j.result = l.run(ctx)
	}()
	return nil
}

// Stop has a job begin nothing new.
func (s *service) Stop(number int, _ *none) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if j := s.jobs[number]; j != nil {
		j.stop()
	}
	return nil
}

// Wait answers when a job has ended.
func (s *service) Wait(number int, r *Result) error {
	s.mu.Lock()
	j := s.jobs[number]
	s.mu.Unlock()
	if j == nil {
		return fmt.Errorf("there is no load %d; its result can be had once", number)
	}
	<-j.ended
	j.stop()
	*r = j.result
	return nil
}

// Forget forgets a job whose result has arrived, or is not wanted.
func (s *service) Forget(number int, _ *none) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.jobs, number)
	return nil
}

// CPU is Worker.CPU.
func (*service) CPU(_ none, used *time.Duration) error {
	var r unix.Rusage
	err := unix.Getrusage(unix.RUSAGE_SELF, &r)
	*used = time.Duration(r.Utime.Nano() + r.Stime.Nano())
	return os.NewSyscallError("getrusage", err)
}
