// Package source is the seam between Fairlead and the places where Services come from. A Source is
// pulled: while its reader is busy it gathers what changes, so that the reader sets the pace and
// nothing happens in callbacks.
//
//	source/file  (manifests) ─┐
//	source/addrs (interfaces) ┼─► Merge ─► Next() ─► service.Batch ─► service.Table
package source

import (
	"context"

	"fairlead.dev/fairlead/service"
)

// A Source delivers objects at its reader's pace. One goroutine calls it.
type Source interface {
	// Next blocks until something changed, and returns all that changed since the last call. The
	// first Batch is complete: what it does not name does not exist. If ctx ends first, Next
	// returns its error and loses nothing.
	Next(ctx context.Context) (service.Batch, error)
	// Close ends all watching.
	Close() error
}
