package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"time"
)

// ErrRunning says that a Fairlead runs here: in this network namespace or, on Windows, on this machine.
var ErrRunning = errors.New("a Fairlead runs here and would restore what clean removes; stop it first")

const (
	// grace is how long a process waits for the end of the one before it.
	grace = 5 * time.Second
	// lookPause is the longest time between two looks. The shortest is half of it.
	lookPause = 50 * time.Millisecond
)

// claim announces this process to others, and returns when no other Fairlead is here. If one is still here after the
// grace, the error names it. If claim cannot look, or cannot announce this process, it logs why and returns no error.
// The result is nil if this process is not announced.
func claim(ctx context.Context, log *slog.Logger) (io.Closer, error) {
	for began, reported := time.Now(), false; ; reported = true {
		l, other, err := tryClaim()
		switch {
		case err != nil:
			log.Warn("cannot check whether another Fairlead runs "+here+"; make sure that none does", "error", err)
			return l, nil
		case other == nil:
			return l, nil
		case time.Since(began) > grace:
			return nil, fmt.Errorf("another Fairlead runs "+here+": %s; "+
				"each would undo the other's rules: stop that one, or leave the node to it", other)
		case !reported:
			log.Info("another Fairlead runs "+here+"; waiting for its end", "by", other.String(), "limit", grace)
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(lookPause/2 + rand.N(lookPause/2)):
		}
	}
}
