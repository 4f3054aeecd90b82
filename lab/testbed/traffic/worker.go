package traffic

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/rpc"
	"net/rpc/jsonrpc"
	"os"
	"time"

	"fairlead.dev/fairlead/lab/testbed"
)

// Worker is a process in a place that serves, or asks. Its methods may be called concurrently.
type Worker struct {
	bed    *testbed.Bed
	place  testbed.Place
	cmd    *testbed.Cmd
	client *rpc.Client
	words  testbed.Output
	ended  chan struct{}
	err    error // how it ended
}

// StartWorker starts one. It lives until Close, at most as long as ctx and the place. The program must call Main
// first.
func StartWorker(ctx context.Context, bed *testbed.Bed, place testbed.Place) (*Worker, error) {
	if os.Getenv(variable) != "" { // or tests of such a program would start themselves again and again
		return nil, errors.New("traffic: this is a worker that does not know it: call traffic.Main first")
	}
	w := &Worker{bed: bed, place: place, ended: make(chan struct{})}
	w.cmd = bed.Command(ctx, place, "/proc/self/exe")
	w.cmd.Args[0] = "traffic@" + string(place)
	w.cmd.Env = append(os.Environ(), variable+"=1")
	w.cmd.Stderr = &w.words
	w.cmd.SysProcAttr.Setpgid = true // an interrupt at the program's terminal leaves it the workers
	in, err := w.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := w.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := w.cmd.Start(); err != nil {
		return nil, fmt.Errorf("traffic: start a worker in %s: %w", place, err)
	}
	go func() {
		w.err = w.cmd.Wait()
		close(w.ended)
	}()
	w.client = rpc.NewClientWithCodec(jsonrpc.NewClientCodec(pipes{out, in}))
	if _, err := w.CPU(ctx); err != nil { // it does not answer
		return nil, errors.Join(err, w.Close())
	}
	return w, nil
}

// pipes are the standard output and input of a worker.
type pipes struct {
	io.Reader
	io.WriteCloser
}

// Serve makes the worker serve, in addition to what it does already. It returns when all ports listen; if one cannot,
// none of them does.
func (w *Worker) Serve(ctx context.Context, s Server) error { return w.call(ctx, "Serve", s, &none{}) }

// Served is what each port has served since it listens.
func (w *Worker) Served(ctx context.Context) (map[uint16]Served, error) {
	var counts map[uint16]Served
	err := w.call(ctx, "Served", none{}, &counts)
	return counts, err
}

// Shut closes all ports, as a server does that ends in order: what comes from then on is refused, and connections that
// are there are served on.
func (w *Worker) Shut(ctx context.Context) error { return w.call(ctx, "Shut", none{}, &none{}) }

// Run has the worker do a Load. If ctx ends before, the load is stopped and the error is that of ctx.
func (w *Worker) Run(ctx context.Context, l Load) (Result, error) {
	r, err := w.Begin(ctx, l)
	if err != nil {
		return Result{}, err
	}
	result, err := r.Wait(ctx)
	if ctx.Err() != nil {
		ctx = context.WithoutCancel(ctx) // the worker does not let one wait
		err = errors.Join(err, w.call(ctx, "Stop", r.job, &none{}), w.call(ctx, "Forget", r.job, &none{}))
	}
	return result, err
}

// Begin has the worker do a Load in the background.
func (w *Worker) Begin(ctx context.Context, l Load) (*Running, error) {
	r := &Running{worker: w}
	if err := w.call(ctx, "Begin", l, &r.job); err != nil {
		return nil, err
	}
	return r, nil
}

// Running is a Load that goes on. Its Result can be had once.
type Running struct {
	worker *Worker
	job    int
}

// Wait returns when the load has ended by itself, or ctx has: then it goes on.
func (r *Running) Wait(ctx context.Context) (Result, error) {
	var result Result
	if err := r.worker.call(ctx, "Wait", r.job, &result); err != nil {
		return Result{}, err
	}
	ctx = context.WithoutCancel(ctx) // the result is there
	return result, r.worker.call(ctx, "Forget", r.job, &none{})
}

// Stop ends the load: no request begins any more, and those under way are awaited.
func (r *Running) Stop(ctx context.Context) (Result, error) {
	if err := r.worker.call(ctx, "Stop", r.job, &none{}); err != nil {
		return Result{}, err
	}
	return r.Wait(ctx)
}

// CPU is the processor time that the worker has taken since it began.
func (w *Worker) CPU(ctx context.Context) (used time.Duration, err error) {
	err = w.call(ctx, "CPU", none{}, &used)
	return used, err
}

// Pid is the worker's.
func (w *Worker) Pid() int { return w.cmd.Process.Pid }

// Ended is closed when the worker has ended.
func (w *Worker) Ended() <-chan struct{} { return w.ended }

// Close ends the worker with all its connections.
func (w *Worker) Close() error {
	_ = w.client.Close() // if it is closed already, the worker ends or has ended
	select {
	case <-w.ended:
	case <-time.After(patience):
		_ = w.cmd.Process.Kill()
		<-w.ended
	}
	if w.err != nil {
		return fmt.Errorf("traffic: the worker in %s ended: %w%s", w.place, w.err, w.lastWords())
	}
	return nil
}

// patience is how long a worker may take to end.
const patience = 10 * time.Second

func (w *Worker) call(ctx context.Context, method string, args, reply any) error {
	call := w.client.Go(serviceName+"."+method, args, reply, make(chan *rpc.Call, 1))
	select {
	case <-call.Done:
	case <-ctx.Done():
		return fmt.Errorf("traffic: %s in %s: %w", method, w.place, ctx.Err())
	}
	var said rpc.ServerError
	if call.Error == nil {
		return nil
	}
	if errors.As(call.Error, &said) {
		return fmt.Errorf("traffic: %s in %s: %w", method, w.place, said)
	}
	select { // the worker is gone, or about to be
	case <-w.ended:
		return fmt.Errorf("traffic: %s: the worker in %s has ended (%w)%s", method, w.place, call.Error, w.lastWords())
	case <-time.After(patience):
		return fmt.Errorf("traffic: %s: the worker in %s does not answer: %w", method, w.place, call.Error)
	}
}

func (w *Worker) lastWords() string {
	const most = 4096 // bytes: the words become part of results
	if said := w.words.String(); said != "" {
		return "; its last words:\n" + said[max(0, len(said)-most):]
	}
	return ""
}
