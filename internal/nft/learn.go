package nft

import (
	"errors"
	"fmt"
	"net/netip"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// A Learner has the pools of one table remember which backends other planes gave to clients.
type Learner struct {
	Ruleset *Ruleset
	Tx      *Transaction
	// Own calls f with what the table remembers itself.
	Own func(f func(dataplane.Session)) error
	// Put appends the steps that remember a client; was is what the table remembers of it that is to be forgotten before,
	// if anything. It reports whether the table can have it.
	Put func(one dataplane.Session, was *dataplane.Session) bool
}

// Take is a dataplane.Taker. Clients come meanwhile, or their time runs out: then it compares anew.
func (l Learner) Take(others *dataplane.Sessions) (n int, err error) {
	first := true
	err = l.Ruleset.Retry(l.Tx, func() error {
		some, err := l.once(others)
		if first {
			n, first = some, false
		}
		return err
	})
	if err != nil {
		err = fmt.Errorf("take over sessions of another data plane: %w", err)
	}
	return n, err
}

func (l Learner) once(others *dataplane.Sessions) (n int, err error) {
	type client struct {
		model.PoolID
		netip.Addr
	}
	superseded := map[client]dataplane.Session{}
	err = l.Own(func(own dataplane.Session) {
		if others.Supersedes(own) {
			superseded[client{own.Pool, own.Client}] = own
		}
	})
	if err != nil {
		return 0, err
	}
	const part = 1 << 13 // how many are sent at once
	for one := range others.All() {
		var was *dataplane.Session
		if own, ok := superseded[client{one.Pool, one.Client}]; ok {
			was = &own
		}
		if !l.Put(one, was) {
			continue
		}
		if n++; n%part == 0 {
			err = errors.Join(err, l.Ruleset.Commit(l.Tx))
		}
	}
	return n, err
}
