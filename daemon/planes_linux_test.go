package daemon

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/handover"
	"fairlead.dev/fairlead/dataplane/iptables"
	"fairlead.dev/fairlead/lab/testbed/nstest"
	"fairlead.dev/fairlead/model"
)

// withXTables makes the thread's kernel one that answers questions for the tables of iptables-legacy with an error;
// ENOPROTOOPT says that there are none.
func withXTables(t *testing.T, says unix.Errno) {
	t.Helper()
	const (
		load, equal, answer        = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, unix.BPF_RET | unix.BPF_K
		number, option             = 0, 32 // struct seccomp_data: the call, and the lower half of its third argument
		getInfo                    = 64    // IPT_SO_GET_INFO
		allow, refuse       uint32 = 0x7fff0000, 0x00050000
	)
	filter := []unix.SockFilter{
		{Code: load, K: number},
		{Code: equal, K: unix.SYS_GETSOCKOPT, Jf: 3},
		{Code: load, K: option},
		{Code: equal, K: getInfo, Jf: 1},
		{Code: answer, K: refuse | uint32(says)},
		{Code: answer, K: allow},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
	if err == nil {
		err = unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&program)), 0, 0)
	}
	if err != nil {
		t.Error(err)
		runtime.Goexit()
	}
}

func TestPlaneSettings_unsupported(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		withXTables(t, unix.ENOPROTOOPT)
		var log bytes.Buffer
		s := planeSettings{name: iptablesPlane, mark: 1 << 20, iptables: iptables.Options{Backend: iptables.Legacy}}
		h, err := startPlane(slog.New(slog.NewTextHandler(&log, nil)), s, drivers(), nil)
		if err != nil {
			t.Error(err)
			return
		}
		if got, want := found(h.InForce()), (planeSettings{name: nftablesPlane, mark: 1 << 20}); got != want {
			t.Errorf("%+v, want %+v", got, want)
		}
		if got := log.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, "nftables serves instead") {
			t.Errorf("the log says\n%s", got)
		}
		ctx := context.Background()
		if err := errors.Join(h.Sync(ctx, model.NewState()), h.Remove(ctx), h.Close()); err != nil {
			t.Error(err)
		}
	})
}

// Tables that cannot be read do not prevent a change to another plane.
func TestPlaneSettings_unreadable(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		if out, err := exec.Command("iptables-legacy", "-t", "nat", "-N", "THEIRS").CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
			return
		}
		withXTables(t, unix.EIO)
		var log bytes.Buffer
		s := planeSettings{name: nftablesPlane, mark: 1 << 20}
		h, err := startPlane(slog.New(slog.NewTextHandler(&log, nil)), s, drivers(), nil)
		if err != nil {
			t.Error(err)
			return
		}
		ctx := context.Background()
		if err := h.Sync(ctx, model.NewState()); err != nil && !errors.Is(err, dataplane.ErrPartial) {
			t.Error(err)
		}
		if got := log.String(); !strings.Contains(got, "cannot check for leftovers of another data plane") {
			t.Errorf("the log says\n%s", got)
		}
		if err := errors.Join(h.Remove(ctx), h.Close()); err != nil {
			t.Error(err)
		}
	})
}

// In mode auto, what cannot be read may be the plane that should stay. That one is chosen anew is said.
func TestAtStart_unreadable(t *testing.T) {
	t.Parallel()
	c := configured(t, "mode: auto")
	nstest.Run(t, func(t *testing.T) {
		if out, err := exec.Command("iptables-legacy", "-t", "nat", "-N", "THEIRS").CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
			return
		}
		for _, unreadable := range []bool{false, true} {
			if unreadable {
				withXTables(t, unix.EIO)
			}
			var log bytes.Buffer
			s, err := (&Daemon{log: slog.New(slog.NewTextHandler(&log, nil))}).atStart(c)
			if err != nil || s.name != autoPlane || strings.Contains(log.String(), "input/output error") != unreadable {
				t.Errorf("unreadable: %t: %s, %v, the log says\n%s", unreadable, s.name, err, &log)
			}
		}
	})
}

// A new plane serves although the old one's objects cannot be removed; the removal is tried again.
func TestHandover_resists(t *testing.T) {
	t.Parallel()
	for from, to := range map[string]string{nftablesPlane: iptablesPlane, iptablesPlane: nftablesPlane} {
		t.Run(from+" to "+to, func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				if err := resisting(slog.New(slog.NewTextHandler(t.Output(), nil)), from, to); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

func resisting(log *slog.Logger, from, to string) error {
	ctx, s := context.Background(), model.NewState()
	old, err := planeSettings{name: from, mark: 1 << 14}.open(dataplane.Config{Log: log})
	if err == nil {
		err = errors.Join(old.Sync(ctx, s), old.Close())
	}
	if err != nil {
		return err
	}
	resists, cleared := errors.New("it resists"), 0
	all := drivers()
	i := slices.IndexFunc(all, func(d dataplane.Driver) bool { return d.Name == from })
	inspect, refuse := all[i].Inspect, true
	all[i].Inspect = func() (dataplane.Leftover, error) {
		if refuse {
			return dataplane.Leftover{}, resists
		}
		return inspect()
	}
	h, err := startPlane(log, planeSettings{name: to, mark: 1 << 14}, all, func(*handover.Plane) { cleared++ })
	if err != nil {
		return err
	}
	defer h.Close()
	err = h.Sync(ctx, s)
	if left, _ := inspect(); !errors.Is(err, dataplane.ErrPartial) || !errors.Is(err, resists) || !left.Rules || cleared > 0 {
		return fmt.Errorf("%w, %+v", err, left)
	}
	refuse = false
	err = h.Sync(ctx, s)
	if left, failed := inspect(); err != nil || failed != nil || left.Rules || cleared != 1 {
		return fmt.Errorf("%w, %w, %+v", err, failed, left)
	}
	if err := errors.Join(h.Sync(ctx, s), h.Remove(ctx)); err != nil || cleared != 1 {
		return fmt.Errorf("%w, cleared %d times", err, cleared)
	}
	return nil
}
