package daemon

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/iptables"
	"fairlead.dev/fairlead/dataplane/userspace"
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
		o, err := s.inherit(dataplane.Config{Log: slog.New(slog.NewTextHandler(&log, nil))}, legacy{cleared: func(opened) {}})
		if err != nil {
			t.Error(err)
			return
		}
		if want := (planeSettings{name: nftablesPlane, mark: 1 << 20}); o.settings != want {
			t.Errorf("%+v, want %+v", o.settings, want)
		}
		if got := log.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, "nftables serves instead") {
			t.Errorf("the log says\n%s", got)
		}
		ctx := context.Background()
		if err := errors.Join(o.Sync(ctx, model.NewState()), o.Remove(ctx), o.Close()); err != nil {
			t.Error(err)
		}
	})
}

// Who wants another plane is not kept from it by tables that cannot be read.
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
		o, err := s.inherit(dataplane.Config{Log: slog.New(slog.NewTextHandler(&log, nil))}, legacy{cleared: func(opened) {}})
		if err != nil {
			t.Error(err)
			return
		}
		ctx := context.Background()
		if err := o.Sync(ctx, model.NewState()); err != nil && !errors.Is(err, dataplane.ErrPartial) {
			t.Error(err)
		}
		if got := log.String(); !strings.Contains(got, "cannot tell whether another data plane has left something") {
			t.Errorf("the log says\n%s", got)
		}
		if err := errors.Join(o.Remove(ctx), o.Close()); err != nil {
			t.Error(err)
		}
	})
}

// What cannot be removed keeps nobody from serving, and is tried again.
func TestHeir(t *testing.T) {
	t.Parallel()
	for from, to := range map[string]string{nftablesPlane: iptablesPlane, iptablesPlane: nftablesPlane} {
		t.Run(from+" to "+to, func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				ctx, s := context.Background(), model.NewState()
				log := slog.New(slog.NewTextHandler(t.Output(), nil))
				o, err := planeSettings{name: from, mark: 1 << 14}.open(dataplane.Config{Log: log})
				if err == nil {
					err = errors.Join(o.Sync(ctx, s), o.Close())
				}
				if err != nil {
					t.Error(err)
					return
				}
				there := func() dataplane.Leftover {
					p, _ := planeNamed(from)
					left, err := p.Inspect()
					if err != nil {
						t.Error(err)
					}
					return left
				}
				cleared := 0
				o, err = planeSettings{name: to, mark: 1 << 14}.inherit(dataplane.Config{Log: log}, legacy{cleared: func(opened) { cleared++ }})
				if err != nil {
					t.Error(err)
					return
				}
				defer o.Close()
				resists := errors.New("it resists")
				o.heir.others = func() []plane {
					return []plane{{Driver: dataplane.Driver{
						Name: from, Inspect: func() (dataplane.Leftover, error) { return dataplane.Leftover{}, resists },
					}}}
				}
				if err := o.Sync(ctx, s); !errors.Is(err, dataplane.ErrPartial) || !errors.Is(err, resists) || !there().Rules || cleared > 0 {
					t.Errorf("%v, %+v", err, there())
				}
				o.heir.others = planes
				if err := o.Sync(ctx, s); err != nil || there().Rules || cleared != 1 {
					t.Errorf("%v, %+v", err, there())
				}
				if err := errors.Join(o.Sync(ctx, s), o.Remove(ctx)); err != nil || cleared != 1 {
					t.Errorf("%v, cleared %d times", err, cleared)
				}
			})
		})
	}
}

// The loop programs both planes where they have rules in common, as it repairs those of the plane in force.
func TestOpened_sharesWith(t *testing.T) {
	for _, c := range []struct {
		a, b string
		over bool // the first one has rules of iptables
		want bool
	}{
		{nftablesPlane, iptablesPlane, false, false},
		{ebpfPlane, nftablesPlane, false, true},
		{ebpfPlane, iptablesPlane, false, false},
		{userspacePlane, iptablesPlane, false, false},
		{userspacePlane, iptablesPlane, true, true},
		{userspacePlane, nftablesPlane, true, false},
	} {
		a := &opened{settings: planeSettings{name: c.a}}
		if c.over {
			a.way = userspace.ByPlane
		}
		b := &opened{settings: planeSettings{name: c.b}}
		if got, back := a.sharesWith(b), b.sharesWith(a); got != c.want || back != c.want {
			t.Errorf("%+v: %t, the other way round %t", c, got, back)
		}
	}
}
