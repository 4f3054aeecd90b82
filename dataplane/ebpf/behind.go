package ebpf

import (
	"context"
	"errors"
	"fmt"
	"iter"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/subset"
	"fairlead.dev/fairlead/model"
)

// leftover is what neither sockets nor the programs for packets can do, which the plane behind does. That one has
// nothing in the kernel while there is no such row, so that no packet pays for it.
//
// It is about connections of the node itself: its packets do not arrive at any device. Sockets translate those of TCP
// and UDP, but do not know which source address they will have, and SCTP has no hook. Where a row allows every address
// of the node, or none, that does not matter.
type leftover struct {
	node   ownAddrs
	behind dataplane.Dataplane // nil: there is none
	part   *subset.Subset      // its State; nil: it has no rows
	known  bool                // the last call has succeeded
}

// isLeft reports whether a row that the node itself meets is left.
func (l *leftover) isLeft(key model.Key, f model.Frontend) bool {
	return key.Protocol == model.SCTP || f.Allow != nil && l.node.flags(key, f) == 0
}

// forNode is the row of a key's address, port and protocol that the node itself meets.
func forNode(s *model.State, key model.Key) (model.Key, model.Frontend, bool) {
	for _, key.Scope = range []model.Scope{model.Internal, model.Any} {
		if f, ok := s.Frontends[key]; ok {
			return key, f, true
		}
	}
	return key, model.Frontend{}, false
}

// row implements subset.Row.
func (l *leftover) row(s *model.State, key model.Key, f model.Frontend) (model.Frontend, bool) {
	if !l.isLeft(key, f) {
		return f, false
	}
	met, _, _ := forNode(s, key)
	return f, met == key
}

// sync makes the plane behind hold the rows that are left, or nothing.
func (l *leftover) sync(ctx context.Context, s *model.State) (err error) {
	if l.behind == nil {
		return nil
	}
	l.forget()
	part := subset.Of(s, l.row)
	if len(part.Frontends) == 0 {
		part, err = nil, l.behind.Remove(ctx)
	} else {
		err = l.behind.Sync(ctx, part.State)
	}
	if dataplane.Known(err) {
		l.part, l.known = part, true
	}
	return err
}

// forget is called when what the plane behind holds is not known any more.
func (l *leftover) forget() { l.part, l.known = nil, false }

// apply follows a change that leads to s.
func (l *leftover) apply(ctx context.Context, s *model.State, c model.Change) error {
	switch {
	case l.behind == nil:
		return nil
	case !l.known:
		return errors.New("the content of the plane behind is not known; Sync first")
	case l.part == nil && !subset.Row(l.row).Touches(s, c):
		return nil
	case l.part == nil:
		return l.sync(ctx, s)
	}
	change := l.part.Change(s, c)
	if len(l.part.Frontends) == 0 {
		return l.sync(ctx, s)
	}
	err := l.behind.Apply(ctx, l.part.State, change)
	if !dataplane.Known(err) {
		l.forget()
		err = fmt.Errorf("rows of the plane behind: %w", err)
	}
	return err
}

// learn has the plane behind know the clients of pools that the rows which are left lead to.
func (l *leftover) learn(ctx context.Context, s *model.State, others iter.Seq2[dataplane.Session, error]) (err error) {
	if part := l.rows(s); part != nil && len(part.Frontends) > 0 {
		_, err = l.behind.Learn(ctx, part.State, others)
	}
	return err
}

// rows is the State of the plane behind, or what it will be after a Sync; nil: it has no rows.
func (l *leftover) rows(s *model.State) *subset.Subset {
	if l.known {
		return l.part
	}
	return subset.Of(s, l.row)
}

// audit compares the plane behind with the rows that are left.
func (l *leftover) audit(ctx context.Context, s *model.State, d dataplane.Depth) (r dataplane.Report, err error) {
	if l.behind == nil {
		return r, nil
	}
	if part := l.rows(s); part != nil && len(part.Frontends) > 0 {
		r, err = l.behind.Audit(ctx, part.State, d)
	}
	return r, err
}
