package takeover

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nfnetlink"
)

// Messages and attributes of include/uapi/linux/netfilter/nfnetlink_acct.h.
const (
	acctSubsystem = 7
	acctGet       = 1
	acctDelete    = 3
	acctName      = 1
)

// accounting is the counters to which rules of mode iptables refer.
type accounting struct{ *kept }

// counts reports whether a chain that stays refers to the counter.
func (a accounting) counts(counter string) bool { return a.forward && counter == invalidCounter }

func (a accounting) find(context.Context) ([]Leftover, error) {
	var found []Leftover
	n := 0
	for _, name := range counters {
		switch exists, err := counterExists(name); {
		case err != nil:
			return nil, err
		case exists && a.counts(name):
			found = append(found, Leftover{Backend: "nfacct", What: "counters", Count: 1,
				Stays: "chain " + forwardChain + " counts with it"})
		case exists:
			n++
		}
	}
	if n > 0 {
		found = append(found, Leftover{Backend: "nfacct", What: "counters", Count: n})
	}
	return found, nil
}

func counterExists(name string) (bool, error) {
	if !mayAsk("nfnetlink_acct") {
		return false, nil
	}
	err := askCounter(acctGet, name)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP):
		return false, nil // not there, or the kernel has none
	case err != nil:
		return false, fmt.Errorf("nfacct counter %s: %w", name, err)
	}
	return true, nil
}

func askCounter(command uint16, name string) error {
	r := nfnetlink.Request{Kind: acctSubsystem<<8 | command, Each: func([]byte) {}}
	r.Filter.Text(acctName, name)
	return netfilter(func(c *nfnetlink.Socket) error { return c.Do(r) })
}

func (a accounting) remove(ctx context.Context) error {
	var errs []error
	for _, name := range counters {
		if a.counts(name) {
			continue
		}
		exists, err := counterExists(name)
		if exists {
			err = whileBusy(ctx, func() error { return askCounter(acctDelete, name) })
		}
		if err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("delete nfacct counter %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}
