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

	"fairlead.dev/fairlead/internal/thread"
)

// fact is what a lack is about.
type fact struct {
	what        string
	missing     func() bool // looks at the machine
	installable bool        // it may be missing although the machine could have it
}

var facts = map[Lack]fact{
	BPFConntrack:   {what: "programs that use connection tracking", missing: noBPFConntrack},
	BPFFS:          {what: "file systems of type bpf", missing: noBPFFS},
	Bubblewrap:     {what: "bubblewrap, which runs containers", installable: true},
	Cgroup:         {what: "control groups of version 2 to make others in", missing: noCgroup},
	Chromium:       {what: "Chromium", missing: ubuntu, installable: true},
	Debian:         {what: "a bare Debian, which ./dev tool debian makes", installable: true},
	Emulator:       {what: "qemu-system-x86_64, which runs older kernels", installable: true},
	Fairlead:       {what: "Fairlead as the proxy under test", missing: testsKubeProxy},
	Helm:           {what: "helm, which ./dev tool helm compiles", installable: true},
	IPVS:           {what: "a kernel with IPVS: see ./dev vm-test", missing: noIPVS},
	LabImage:       {what: "the laboratory's image, for which there must be Debian's packages", installable: true},
	Linux514:       {what: "Linux 5.14 or later", missing: func() bool { return before(5, 14) }},
	Linux63:        {what: "Linux 6.3 or later", missing: func() bool { return before(6, 3) }},
	Linux66:        {what: "Linux 6.6 or later", missing: func() bool { return before(6, 6) }},
	MPTCP:          {what: "a kernel with MPTCP", missing: func() bool { return !speaks(unix.IPPROTO_MPTCP) }},
	NoSCTP:         {what: "a kernel without SCTP", missing: func() bool { return speaks(unix.IPPROTO_SCTP) }},
	Parts:          {what: "the programs of a cluster, which ./dev parts builds", installable: true},
	Prometheus:     {what: "prometheus and its promtool", installable: true},
	Root:           {what: "root, and not only that of a user namespace", missing: notRoot},
	SiteTools:      {what: "the generator of the site, which ./dev site installs", installable: true},
	SocketMemory:   {what: "sockets with memory of their own in eBPF", missing: noCmpxchg16b},
	TestKernel:     {what: "the test kernel, which ./dev kernel builds", missing: noX86, installable: true},
	Tun:            {what: "devices of type tun", missing: func() bool { return absent("/dev/net/tun") }},
	UserNamespaces: {what: "the right to make user namespaces", missing: noUserNamespaces},
	VXLAN:          {what: "devices of type vxlan", missing: noVXLAN},
	Wine:           {what: "Wine, which ./dev wine prepares", missing: noX86, installable: true},
}

// Explained reports whether the machine lacks it, such that nothing that can be installed would help.
func (l Lack) Explained() bool {
	missing := facts[l].missing
	return missing != nil && missing()
}

// notRoot reports whether this process has not got root's rights, or sees other users than the machine has.
func notRoot() bool {
	users, err := os.ReadFile("/proc/self/uid_map")
	if err == nil && strings.Join(strings.Fields(string(users)), " ") != "0 0 4294967295" {
		return true
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var rights [2]unix.CapUserData
	err = unix.Capget(&header, &rights[0])
	return err == nil && rights[0].Effective&(1<<unix.CAP_SYS_ADMIN) == 0
}

func noCgroup() bool { return notRoot() || !contains("/proc/self/mounts", " cgroup2 rw") }

func noBPFFS() bool { return notRoot() || !contains("/proc/filesystems", "\tbpf\n") }

func noBPFConntrack() bool { return before(6, 1) || absent("/sys/kernel/btf/vmlinux") }

func noIPVS() bool { return absent("/proc/net/ip_vs") }

// ubuntu has Chromium as a snap only.
func ubuntu() bool { return contains("/etc/os-release", "\nID=ubuntu\n") }

func testsKubeProxy() bool { return os.Getenv("FAIRLEAD_TEST_PROXY") == "kube-proxy" }

func noX86() bool { return runtime.GOARCH != "amd64" }

// noCmpxchg16b: recent kernels take that memory by kmalloc_nolock, which needs this instruction (mm/slub.c). User-Mode
// Linux does without it, whatever the processor has.
func noCmpxchg16b() bool {
	return contains("/proc/cpuinfo", "User Mode Linux") || runtime.GOARCH == "amd64" && !contains("/proc/cpuinfo", " cx16")
}

func absent(file string) bool {
	_, err := os.Stat(file)
	return errors.Is(err, fs.ErrNotExist)
}

func contains(file, what string) bool {
	text, err := os.ReadFile(file)
	return err == nil && strings.Contains("\n"+string(text), what)
}

func before(major, minor uint32) bool {
	version, err := features.LinuxVersionCode()
	return err == nil && version < major<<16|minor<<8
}

// speaks reports whether there are sockets of a protocol.
func speaks(protocol int) bool {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return false
	}
	unix.Close(fd)
	return true
}

func noUserNamespaces() bool {
	c := exec.Command("/bin/true")
	c.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
	}
	return c.Run() != nil
}

// noVXLAN tries to make such a device in a network namespace of its own.
func noVXLAN() (lacking bool) {
	done := make(chan error)
	thread.Run(func() {
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = netlink.LinkAdd(&netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: "lack"}, VxlanId: 1, Port: 8472})
		}
		done <- err
	})
	return <-done != nil
}
