package source

import (
	"context"
	"errors"
	"sync"

	"fairlead.dev/fairlead/service"
)

// Merge makes one Source of several that deliver different objects, such as manifests and the
// addresses of interfaces. Its first Batch waits for the first one of each, so that it is complete.
// Where two sources name the same object, the latest word wins. An error of one ends the whole.
func Merge(sources ...Source) Source {
	ctx, stop := context.WithCancel(context.Background())
	m := &merged{sources: sources, stop: stop, batches: make(chan delivery), waiting: len(sources)}
	for _, s := range sources {
		m.pullers.Go(func() { m.pull(ctx, s) })
	}
	return m
}

// merged pulls each source in a goroutine of its own, which offers one batch at a time: while the
// reader is busy the next changes gather in the source itself.
type merged struct {
	sources []Source
	stop    context.CancelFunc
	pullers sync.WaitGroup
	batches chan delivery
	waiting int           // sources whose first batch has not come
	pending service.Batch // what came and is not yet returned
	err     error
}

type delivery struct {
	batch service.Batch
	first bool
	err   error
}

func (m *merged) pull(ctx context.Context, s Source) {
	for first := true; ; first = false {
		batch, err := s.Next(ctx)
		select {
		case m.batches <- delivery{batch, first, err}:
		case <-ctx.Done():
			return
		}
		if err != nil {
			return
		}
	}
}

// Next returns what came from all sources since the last call.
func (m *merged) Next(ctx context.Context) (service.Batch, error) {
	fresh := false
	for m.err == nil && (!fresh || m.waiting > 0) {
		select {
		case d := <-m.batches:
			m.take(d)
			fresh = true
		case <-ctx.Done():
			return service.Batch{}, ctx.Err()
		}
	}
	if m.err != nil {
		return service.Batch{}, m.err
	}
	m.takeReady()
	batch := m.pending
	m.pending = service.Batch{}
	return batch, nil
}

// takeReady adds what other sources offer at this moment; it saves the reader a round.
func (m *merged) takeReady() {
	for range m.sources {
		select {
		case d := <-m.batches:
			m.take(d)
		default:
			return
		}
	}
}

func (m *merged) take(d delivery) {
	if d.err != nil {
		m.err = errors.Join(m.err, d.err)
		return
	}
	if d.first {
		m.waiting--
	}
	Add(&m.pending, d.batch)
}

// Add lets a later batch follow an earlier one, whose memory it may go on using.
func Add(to *service.Batch, b service.Batch) {
	to.Services.Add(b.Services)
	to.Slices.Add(b.Slices)
	if b.Node != nil {
		to.Node = b.Node
	}
	if b.ServiceCIDRs != nil {
		to.ServiceCIDRs = b.ServiceCIDRs
	}
	if b.Addrs != nil {
		to.Addrs = b.Addrs
	}
	if b.Version != 0 {
		to.Version = b.Version
	}
	to.Resolve(b.Resolved...)
	to.Problems = append(to.Problems, b.Problems...)
}

// Close ends the pulling, then closes every source.
func (m *merged) Close() error {
	m.stop()
	m.pullers.Wait()
	var errs []error
	for _, s := range m.sources {
		errs = append(errs, s.Close())
	}
	return errors.Join(errs...)
}
