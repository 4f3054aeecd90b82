package conformance_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/procfs"

	"fairlead.dev/fairlead/conformance"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/testbed"
)

// ebpfPlane serves the sockets of the calling thread's cgroup, and packets itself or by another plane.
func ebpfPlane(t *testing.T, serve ebpf.Server, behind dataplane.New) dataplane.New {
	if _, err := threadCgroup(); err != nil {
		t.Skip(err)
	}
	fs, pins, err := testbed.BPFFS()
	if err != nil {
		t.Skipf("no place for pins: %v", err)
	}
	t.Cleanup(func() { fs.Close() })
	return func(c dataplane.Config) (dataplane.Dataplane, error) {
		cgroup, err := threadCgroup()
		if err != nil {
			return nil, err
		}
		return ebpf.New(ebpf.Options{
			Cgroup: cgroup, Pins: filepath.Join(pins, filepath.Base(cgroup)), Serve: serve, Packets: behind,
		})(c)
	}
}

// threadCgroup is the directory of the calling thread's cgroup.
func threadCgroup() (string, error) {
	mounts, err := procfs.GetMounts()
	if err != nil {
		return "", err
	}
	own, err := os.ReadFile("/proc/thread-self/cgroup")
	if err != nil {
		return "", err
	}
	_, path, _ := strings.Cut(string(own), "0::")
	for _, m := range mounts {
		if m.FSType == "cgroup2" {
			return filepath.Join(m.MountPoint, strings.TrimSpace(path)), nil
		}
	}
	return "", fmt.Errorf("no control groups of version 2: %w", errors.ErrUnsupported)
}

func TestEBPF(t *testing.T) {
	t.Parallel()
	conformance.RunSockets(t, "ebpf", ebpfPlane(t, ebpf.TC, plane))
}

// Where the kernel has no programs for packets, or nobody wants them.
func TestEBPF_behind(t *testing.T) {
	t.Parallel()
	conformance.RunSockets(t, "ebpf", ebpfPlane(t, ebpf.Behind, plane))
}

// What sockets can do without another plane.
func TestEBPF_alone(t *testing.T) {
	t.Parallel()
	conformance.RunOnlySockets(t, "sockets", ebpfPlane(t, ebpf.Behind, nil))
}

func TestEBPF_random(t *testing.T) {
	t.Parallel()
	conformance.RunRandomSockets(t, ebpfPlane(t, ebpf.TC, plane))
}

func TestEBPF_faults(t *testing.T) {
	t.Parallel()
	conformance.RunFaultsSockets(t, ebpfPlane(t, ebpf.TC, plane))
}
