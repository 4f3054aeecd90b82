package nft

import (
	"errors"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/nfnetlink"
)

// maxRefusals is after how many refused steps those of a refused transaction are not tried apart.
const maxRefusals = 16

// Commit has send perform the steps in as few kernel transactions as their size allows. The error is
// dataplane.ErrPartial if all but a few steps, which the kernel refuses, have been done.
func (t *Transaction) Commit(c *nfnetlink.Socket, send func(steps []Step) error) error {
	if t.Replaces() {
		return send(t.Steps) // all or none
	}
	var errs []error
	for steps := range t.Chunks(c, chunkSize) {
		isolate(steps, send, &errs)
	}
	err := errors.Join(errs...)
	if err == nil || len(errs) >= maxRefusals || slices.ContainsFunc(errs, func(e error) bool { return !refused(e) }) {
		return err
	}
	return dataplane.Partial(err)
}

// Replaces reports whether a new table takes the place of an old one, or of none.
func (t *Transaction) Replaces() bool {
	return slices.ContainsFunc(t.Steps, func(s Step) bool { return s.Verb == unix.NFT_MSG_DELTABLE })
}

// isolate performs steps in one kernel transaction. If the kernel refuses it, isolate splits it into ever smaller ones,
// so that a refused row does not keep the others out. The kernel names the first step that it refuses, but there may be
// more, and the steps after a refused one were not looked at. Halving finds a few refused ones among a hundred thousand
// in some tens of transactions.
func isolate(steps []Step, send func([]Step) error, errs *[]error) {
	err := send(steps)
	if err == nil {
		return
	}
	half := middle(steps)
	if half == 0 || !refused(err) || len(*errs) >= maxRefusals {
		*errs = append(*errs, err)
		return
	}
	isolate(steps[:half], send, errs)
	isolate(steps[half:], send, errs)
}

// middle is where steps can be parted, as near to their middle as the joined ones allow; 0: nowhere.
func middle(steps []Step) int {
	half := len(steps) / 2
	for before, after := half, half; before > 0 || after < len(steps); before, after = before-1, after+1 {
		if before > 0 && !steps[before-1].joined {
			return before
		}
		if after > 0 && after < len(steps) && !steps[after-1].joined {
			return after
		}
	}
	return 0
}

// refused reports whether an error is about what was sent, not about the connection, our rights, or a
// ruleset that is not what we take it for.
func refused(err error) bool {
	var r *Refusal
	return errors.As(err, &r) && !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.ENOENT)
}
