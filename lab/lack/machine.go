package lack

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"

	"github.com/cilium/ebpf/features"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// machine looks whether this machine has what a lack is about, and reports whether it lacks it. What has no function is
// there to be installed or built, so that no machine explains it.
var machine = map[Lack]func() bool{
	Root:           func() bool { return os.Getuid() != 0 || inUserNamespace() },
	UserNamespaces: noUserNamespaces,
	Cgroup:         func() bool { return os.Getuid() != 0 || inUserNamespace() || !mounted("cgroup2") },
	BPFFS:          func() bool { return os.Getuid() != 0 || inUserNamespace() || !contains("/proc/filesystems", "bpf\n") },
	Linux514:       func() bool { return before(5, 14) },
	Linux63:        func() bool { return before(6, 3) },
	Linux66:        func() bool { return before(6, 6) },
	BPFConntrack:   func() bool { return before(6, 1) || absent("/sys/kernel/btf/vmlinux") },
	IPVS:           func() bool { return absent("/proc/net/ip_vs") },
	MPTCP:          func() bool { return !socket(unix.SOCK_STREAM, unix.IPPROTO_MPTCP) },
	NoSCTP:         func() bool { return socket(unix.SOCK_STREAM, unix.IPPROTO_SCTP) },
	SocketMemory:   func() bool { return runtime.GOARCH == "amd64" && !contains("/proc/cpuinfo", " cx16") },
	Tun:            func() bool { return absent("/dev/net/tun") },
	VXLAN:          noVXLAN,
	TestKernel:     func() bool { return runtime.GOARCH != "amd64" }, // there is no User-Mode Linux
	Parts:          nil,
	Helm:           nil,
	Chromium:       func() bool { return contains("/etc/os-release", "\nID=ubuntu\n") }, // it has a snap only
	Prometheus:     nil,
	Fairlead:       func() bool { return os.Getenv("FAIRLEAD_TEST_PROXY") == "kube-proxy" },
}

// Explained reports whether the machine lacks it, such that nothing that can be installed would help.
func (l Lack) Explained() bool {
	look := machine[l]
	return look != nil && look()
}

func absent(file string) bool {
	_, err := os.Stat(file)
	return errors.Is(err, fs.ErrNotExist)
}

func contains(file, what string) bool {
	text, err := os.ReadFile(file)
	return err == nil && strings.Contains("\n"+string(text), what)
}

func mounted(kind string) bool { return contains("/proc/self/mounts", " "+kind+" rw") }

// inUserNamespace reports whether this process sees other users than the machine has.
func inUserNamespace() bool {
	text, err := os.ReadFile("/proc/self/uid_map")
	return err == nil && strings.Join(strings.Fields(string(text)), " ") != "0 0 4294967295"
}

func before(major, minor uint32) bool {
	version, err := features.LinuxVersionCode()
	return err == nil && version < major<<16|minor<<8
}

func socket(kind, protocol int) bool {
	fd, err := unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return false
	}
	unix.Close(fd)
	return true
}

func noUserNamespaces() bool {
	c := exec.Command("/proc/self/exe", "-test.run=^$")
	c.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
	}
	err := c.Start()
	if err == nil {
		_ = c.Process.Kill()
		_ = c.Wait()
	}
	return err != nil
}

// noVXLAN tries to make such a device in a network namespace of its own.
func noVXLAN() (lacking bool) {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine, and the namespace with it
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = netlink.LinkAdd(&netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: "lack"}, VxlanId: 1, Port: 8472})
		}
		done <- err
	}()
	return <-done != nil
}
