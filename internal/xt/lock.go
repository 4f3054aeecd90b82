package xt

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// LockFile is what all users of x_tables lock: iptables-legacy (iptables/xshared.c), kubelet, CNI plug-ins.
// Unlike the tables it is one for all network namespaces.
const LockFile = "/run/xtables.lock"

// lockVariable names another file, as for iptables (iptables/xshared.c).
const lockVariable = "XTABLES_LOCKFILE"

const (
	lockInterval = 5 * time.Millisecond
	lockPatience = time.Second // then we say that we wait
)

// Lock waits for the lock. Closing the file gives it up.
func Lock(ctx context.Context, log *slog.Logger) (*os.File, error) {
	file := cmp.Or(os.Getenv(lockVariable), LockFile)
	f, err := os.OpenFile(file, os.O_RDONLY|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("the lock of the machine's iptables: %w: in a container, mount that file of the host", err)
	}
	began := time.Now()
	for reported := false; ; {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		waited := time.Since(began)
		switch {
		case err == nil && reported:
			log.Warn("another program kept iptables locked", "path", file, "took", waited)
			fallthrough
		case err == nil:
			return f, nil
		case !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR):
			return nil, errors.Join(fmt.Errorf("lock %s: %w", file, err), f.Close())
		case waited > lockPatience && !reported:
			reported = true
			log.Warn("waiting for another program that changes iptables", "path", file)
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("wait for %s, which another program holds: %w", file, ctx.Err()), f.Close())
		case <-time.After(lockInterval):
		}
	}
}
