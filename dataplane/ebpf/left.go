package ebpf

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"fairlead.dev/fairlead/dataplane"
)

// File systems are not the network namespace's, and a node may be a container, or a test's. A symbolic link beside the
// pins names their node, so that no process of another node touches them.
const ownerLink = "netns"

// ownNode names the network namespace of the calling thread.
func ownNode() (string, error) { return os.Readlink("/proc/thread-self/ns/net") }

// owner is whose the pins in a directory are; empty: it is unknown.
func owner(dir string) (string, error) {
	name, err := os.Readlink(filepath.Join(dir, ownerLink))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return name, err
}

// claim makes the directory of pins this node's, unless it is another one's.
func (p *Plane) claim() error {
	if err := os.MkdirAll(p.pins, 0o700); err != nil {
		return err
	}
	name, err := owner(p.pins)
	switch {
	case err != nil || name == p.node:
		return err
	case name == "":
		return os.Symlink(p.node, filepath.Join(p.pins, ownerLink))
	}
	return fmt.Errorf("%s has the pins of another node (network namespace %s, this one is %s); set ebpf.bpfRoot "+
		"(--bpf-root) to another file system, or remove them if that node is gone", p.pins, name, p.node)
}

// inspect tells what is left of the plane.
func inspect() (dataplane.Leftover, error) {
	dirs, err := leftoverPins()
	active := slices.ContainsFunc(dirs, func(dir string) bool {
		_, err := os.Stat(filepath.Join(dir, drainingMark))
		return err != nil
	})
	return dataplane.Leftover{Rules: len(dirs) > 0, Retired: len(dirs) > 0 && !active}, err
}

// removeLeft deletes that.
func removeLeft(ctx context.Context, c dataplane.Config) error {
	dirs, err := leftoverPins()
	errs := []error{err}
	for _, dir := range dirs {
		p := &Plane{config: c, pins: dir}
		errs = append(errs, p.Remove(ctx), p.Close())
	}
	errs = append(errs, dropPortsTable()) // pins may be gone that it was for
	return errors.Join(errs...)
}

// leftoverPins are the directories of pins of this node, wherever a file system of type bpf is mounted.
func leftoverPins() (dirs []string, err error) {
	mounts, err := mountsOf("bpf")
	if err != nil {
		return nil, err
	}
	self, err := ownNode()
	if err != nil {
		return nil, err
	}
	for _, m := range mounts {
		dir := filepath.Join(m.MountPoint, PinsDir)
		name, err := owner(dir)
		if errors.Is(err, fs.ErrPermission) { // nothing that this process could have made
			continue
		}
		if err != nil {
			return nil, err
		}
		if name == self {
			dirs = append(dirs, dir)
		}
	}
	return dirs, nil
}
