package traffic

import (
	"context"
	"errors"

	"golang.org/x/sync/errgroup"
)

// Together has workers share a Load: its clients, its requests and its rate are divided among them. The result is that
// of all.
func Together(ctx context.Context, workers []*Worker, l Load) (Result, error) {
	if len(workers) == 0 {
		return Result{}, errors.New("traffic: a load needs a worker")
	}
	if l.Protocol == Bare {
		l.Concurrency = len(workers)
	}
	workers = workers[:min(len(workers), max(l.Concurrency, 1))]
	results := make([]Result, len(workers))
	group, ctx := errgroup.WithContext(ctx)
	for i, w := range workers {
		part := l.part(i, len(workers))
		if l.Requests > 0 && part.Requests == 0 {
			continue
		}
		group.Go(func() (err error) {
			results[i], err = w.Run(ctx, part)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return Result{}, err
	}
	all := results[0]
	for _, r := range results[1:] {
		all.Merge(r)
	}
	return all, nil
}

// processes is how many a load needs that may open so many files. If it would be too many it is one, which says so.
func (l Load) processes(files int) int {
	const most = 8
	n := (l.files() + files - 1) / max(files, 1)
	if n > most {
		return 1
	}
	return n
}

// share does a load with n-1 more workers.
func (w *Worker) share(ctx context.Context, l Load, n int) (_ Result, err error) {
	workers := []*Worker{w}
	defer func() {
		for _, other := range workers[1:] {
			err = errors.Join(err, other.Close())
		}
	}()
	for range n - 1 {
		other, err := StartWorker(ctx, w.bed, w.place)
		if err != nil {
			return Result{}, err
		}
		workers = append(workers, other)
	}
	return Together(ctx, workers, l)
}

// part is what one of several workers does.
func (l Load) part(number, of int) Load {
	share := func(n int) int {
		part := n / of
		if number < n%of {
			part++
		}
		return part
	}
	l.Concurrency, l.Requests, l.Rate = share(l.Concurrency), share(l.Requests), l.Rate/float64(of)
	return l
}
