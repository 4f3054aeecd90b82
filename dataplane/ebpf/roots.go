package ebpf

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
)

// The plane needs two directories of the machine: the root of its cgroups, and a file system of type bpf. In a
// container both are easily others than they seem to be.

// rootInode is the number of a hierarchy's root (kernfs_create_root in the kernel's fs/kernfs/dir.c).
const rootInode = 1

// findCgroup is where the hierarchy of cgroups of version 2 is mounted, its root if that can be seen.
func findCgroup() (string, error) {
	mounts, err := mountsOf("cgroup2")
	if err != nil {
		return "", err
	}
	if len(mounts) == 0 {
		return "", fmt.Errorf("%w: no cgroups of version 2 are mounted (mount -t cgroup2 none DIRECTORY)",
			dataplane.ErrUnsupported)
	}
	for _, m := range mounts {
		var root unix.Stat_t
		if err := unix.Stat(m.MountPoint, &root); err == nil && root.Ino == rootInode {
			return m.MountPoint, nil
		}
	}
	return mounts[0].MountPoint, nil
}

// mountsOf are the mounts of a type of file systems.
func mountsOf(fsType string) ([]*procfs.MountInfo, error) {
	mounts, err := procfs.GetMounts()
	if err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	return slices.DeleteFunc(mounts, func(m *procfs.MountInfo) bool { return m.FSType != fsType }), nil
}

// checkCgroup refuses the one mistake that would go unnoticed: the cgroup of the container that this process is in,
// which looks like the machine's. Any other below the root has been chosen, or the node is a container itself.
func (p *Plane) checkCgroup() error {
	if p.cgroupID == rootInode {
		return nil
	}
	own, err := isOwnCgroup(p.cgroup)
	if err != nil {
		return err
	}
	if own {
		return fmt.Errorf("%w: %s is not the root of the machine's cgroups but that of this container; mount the "+
			"machine's /sys/fs/cgroup into it, and set ebpf.cgroupRoot (--cgroup-root) to "+
			"that", dataplane.ErrUnsupported, p.cgroup)
	}
	p.config.Logger().Info("the cgroup is not the root of the machine's cgroups: for processes outside of it, Services "+
		"are served packet by packet", "path", p.cgroup)
	return nil
}

// isOwnCgroup reports whether a directory is the root of this process's cgroup namespace, and has nothing in it but
// this process's container.
func isOwnCgroup(dir string) (bool, error) {
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return false, err
	}
	mounts, err := mountsOf("cgroup2")
	if err != nil {
		return false, err
	}
	isRoot := slices.ContainsFunc(mounts, func(m *procfs.MountInfo) bool {
		return m.MountPoint == filepath.Clean(dir) && m.Root == "/"
	})
	if !isRoot || !slices.Contains(strings.Split(string(own), "\n"), "0::/") {
		return false, nil
	}
	entries, err := os.ReadDir(dir)
	return !slices.ContainsFunc(entries, fs.DirEntry.IsDir), err
}

// mountBPF makes sure that a directory is in a file system of type bpf. It mounts one only where others will see it:
// one in a mount namespace of this process's own would end with it, and the programs with that.
func mountBPF(dir string) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return fmt.Errorf("%w: %s: %w", dataplane.ErrUnsupported, dir, err)
	}
	if fs.Type == unix.BPF_FS_MAGIC {
		return nil
	}
	lacking := fmt.Errorf("%w: there is no file system of type bpf, to keep programs in: "+
		"mount -t bpf bpf %s on the machine", dataplane.ErrUnsupported, dir)
	shared, err := isShared(dir)
	if err == nil && !shared {
		return lacking
	}
	if err == nil {
		err = unix.Mount("bpf", dir, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700")
	}
	if err != nil {
		return fmt.Errorf("%w (%w)", lacking, err)
	}
	return nil
}

// isShared reports whether what is mounted in a directory is mounted in other mount namespaces, too.
func isShared(dir string) (bool, error) {
	mounts, err := procfs.GetMounts()
	if err != nil {
		return false, err
	}
	longest, shared := "", false
	for _, m := range mounts {
		at := strings.TrimSuffix(m.MountPoint, "/") + "/"
		if strings.HasPrefix(filepath.Clean(dir)+"/", at) && len(at) >= len(longest) {
			longest = at
			_, shared = m.OptionalFields["shared"]
		}
	}
	return shared, nil
}

// checkRights names the capabilities that are missing. Without CAP_PERFMON the kernel's verifier ends in errors that
// say nothing of it.
func checkRights() error {
	var sets [2]unix.CapUserData
	if err := unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &sets[0]); err != nil {
		return os.NewSyscallError("capget", err)
	}
	has := func(c int) bool { return sets[c/32].Effective&(1<<(c%32)) != 0 }
	var missing []string
	for _, c := range []struct {
		name  string
		bit   int
		admin bool // CAP_SYS_ADMIN includes it
	}{
		{"CAP_BPF", unix.CAP_BPF, true},
		{"CAP_PERFMON", unix.CAP_PERFMON, true},
		{"CAP_NET_ADMIN", unix.CAP_NET_ADMIN, false},
	} {
		if !has(c.bit) && (!c.admin || !has(unix.CAP_SYS_ADMIN)) {
			missing = append(missing, c.name)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("this process lacks %s: %w", strings.Join(missing, ", "), unix.EPERM)
	}
	return nil
}
