package takeover

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// xtLock is the file that all users of x_tables lock: iptables-legacy (iptables/xshared.c), kubelet,
// CNI plug-ins. Unlike the tables it is one for all network namespaces.
const xtLock = "/run/xtables.lock"

const (
	lockInterval = 50 * time.Millisecond
	lockPatience = time.Second // then we say that we wait
)

// lockXT waits for the lock. Closing the file gives it up.
func lockXT(ctx context.Context, log *slog.Logger) (*os.File, error) {
	f, err := os.OpenFile(xtLock, os.O_RDONLY|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("the lock of the machine's iptables: %w: in a container, mount that file of the host", err)
	}
	for tries := 1; ; tries++ {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", xtLock, err), f.Close())
		}
		if tries == int(lockPatience/lockInterval) {
			log.Info("waiting for another program that changes iptables", "lock", xtLock)
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("wait for %s, which another program holds: %w", xtLock, ctx.Err()), f.Close())
		case <-time.After(lockInterval):
		}
	}
}
