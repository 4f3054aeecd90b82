package vm

import (
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Guest is all of process 1's life, if this process is that of the test kernel; otherwise it does
// nothing.
func Guest() {
	file := os.Getenv(requestVariable)
	if os.Getpid() != 1 || file == "" {
		return
	}
	if err := guest(file); err != nil {
		fmt.Fprintln(os.Stderr, "test kernel:", err) // its console
	}
	// The machine ends us when it has read the exit status.
	for err := unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF); ; {
		fmt.Fprintln(os.Stderr, "test kernel: power off:", err)
		_ = unix.Pause()
	}
}

func guest(file string) error {
	r, err := readRequest(file)
	if err != nil {
		return err
	}
	if err := enterRoot(r.Shared); err != nil {
		return err
	}
	if err := setUp(); err != nil {
		return err
	}
	c, err := openConsole()
	if err != nil {
		return err
	}
	status, err := c.run(r)
	if err != nil {
		return err
	}
	unix.Sync() // shared files reach the machine
	return c.end(status)
}

func readRequest(file string) (r request, err error) {
	f, err := os.Open(file)
	if err != nil {
		return r, err
	}
	defer f.Close()
	return r, gob.NewDecoder(f).Decode(&r)
}

// mount is a line of what process 1 has to mount.
type mount struct{ fs, target, options string }

// enterRoot lays memory over the machine's files, which are read-only here, and makes that our root. The
// directory dev serves as the place for it: that is there on every machine, and the guest has another.
func enterRoot(shared []string) error {
	if err := (mount{"tmpfs", "/dev", "size=75%"}).do(); err != nil {
		return err
	}
	for _, dir := range []string{"/dev/upper", "/dev/work", "/dev/root"} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	mounts := []mount{
		{"overlay", "/", "lowerdir=/,upperdir=/dev/upper,workdir=/dev/work"},
		{"proc", "/proc", ""},
		{"sysfs", "/sys", ""},
		{"cgroup2", "/sys/fs/cgroup", ""},
		{"bpf", "/sys/fs/bpf", ""},
		{"devtmpfs", "/dev", ""},
		{"devpts", "/dev/pts", "ptmxmode=666"},
		{"tmpfs", "/dev/shm", ""},
		{"mqueue", "/dev/mqueue", ""},
		{"tmpfs", "/run", ""},
	}
	for _, dir := range shared {
		mounts = append(mounts, mount{"hostfs", dir, dir})
	}
	for _, m := range mounts {
		m.target = filepath.Join("/dev/root", m.target)
		if err := m.do(); err != nil {
			return err
		}
	}
	if err := unix.Chroot("/dev/root"); err != nil {
		return fmt.Errorf("chroot: %w", err)
	}
	return os.Chdir("/")
}

func (m mount) do() error {
	if err := os.MkdirAll(m.target, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if err := unix.Mount(m.fs, m.target, m.fs, 0, m.options); err != nil {
		return fmt.Errorf("mount %s at %s: %w", m.fs, m.target, err)
	}
	return nil
}

// setUp does what a machine's own init does that programs rely on.
func setUp() error {
	for _, l := range []struct{ target, name string }{
		{"/proc/self/fd", "/dev/fd"}, {"fd/0", "/dev/stdin"}, {"fd/1", "/dev/stdout"}, {"fd/2", "/dev/stderr"},
	} {
		if err := os.Symlink(l.target, l.name); err != nil {
			return err
		}
	}
	for _, dir := range []string{"/run/lock", "/run/netns"} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	if err := unix.Sethostname([]byte("test-kernel")); err != nil {
		return err
	}
	files := unix.Rlimit{Cur: 1 << 16, Max: 1 << 16}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		return err
	}
	lo := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: 1}}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set loopback up: %w", err)
	}
	return nil
}

// console is the line to Machine.Run.
type console struct {
	tty     *os.File
	mu      sync.Mutex
	encoder *gob.Encoder
}

// openConsole has the kernel pass every byte as it is.
func openConsole() (*console, error) {
	tty, err := os.OpenFile("/dev/tty1", os.O_WRONLY|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	settings, err := unix.IoctlGetTermios(int(tty.Fd()), unix.TCGETS)
	if err != nil {
		return nil, err
	}
	settings.Oflag &^= unix.OPOST
	if err := unix.IoctlSetTermios(int(tty.Fd()), unix.TCSETS, settings); err != nil {
		return nil, err
	}
	return &console{tty: tty, encoder: gob.NewEncoder(tty)}, nil
}

func (c *console) send(m message) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.encoder.Encode(m)
}

// end sends the status and waits until it is gone: the kernel ends with us.
func (c *console) end(status int) error {
	if err := c.send(message{Ended: true, Status: status}); err != nil {
		return err
	}
	const drain = 1
	return unix.IoctlSetInt(int(c.tty.Fd()), unix.TCSBRK, drain)
}

// run runs the command, and ends what it leaves running.
func (c *console) run(r request) (status int, err error) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		return 0, err
	}
	var copies sync.WaitGroup
	files := []*os.File{null}
	for _, wrap := range []func([]byte) message{
		func(b []byte) message { return message{Stdout: b} },
		func(b []byte) message { return message{Stderr: b} },
	} {
		read, write, err := os.Pipe()
		if err != nil {
			return 0, err
		}
		files = append(files, write)
		copies.Go(func() { c.copy(read, wrap) })
	}
	pid, err := start(r, files)
	for _, f := range files {
		f.Close()
	}
	if err != nil {
		status = 127
		err = c.send(message{Stderr: fmt.Appendf(nil, "test kernel: %v\n", err)})
	} else {
		status, err = reap(pid)
	}
	copies.Wait()
	return status, err
}

func (c *console) copy(from io.Reader, wrap func([]byte) message) {
	buffer := make([]byte, 32<<10)
	for {
		n, err := from.Read(buffer)
		if n > 0 && c.send(wrap(buffer[:n])) != nil || err != nil {
			return
		}
	}
}

func start(r request, files []*os.File) (pid int, err error) {
	for i, variable := range r.Env {
		if path, is := strings.CutPrefix(variable, "PATH="); is {
			r.Env[i] = "PATH=" + path + ":/usr/local/sbin:/usr/sbin:/sbin"
			os.Setenv("PATH", strings.TrimPrefix(r.Env[i], "PATH="))
		}
	}
	r.Env = append(r.Env, requestVariable+"=") // which says where they are, see Replay
	if err := os.Chdir(r.Dir); err != nil {    // also for a program named relative to it
		return 0, err
	}
	path, err := exec.LookPath(r.Args[0])
	if err != nil {
		return 0, err
	}
	p, err := os.StartProcess(path, r.Args, &os.ProcAttr{Dir: r.Dir, Env: r.Env, Files: files})
	if err != nil {
		return 0, err
	}
	return p.Pid, nil
}

// reap waits for the command, and for every process that has lost its parent; then for those that it
// has left, which it kills.
func reap(pid int) (status int, err error) {
	for {
		var w unix.WaitStatus
		ended, err := unix.Wait4(-1, &w, 0, nil)
		switch {
		case errors.Is(err, unix.ECHILD):
			return status, nil
		case err != nil && !errors.Is(err, unix.EINTR):
			return 0, fmt.Errorf("wait for the command: %w", err)
		case ended == pid && w.Signaled():
			status = 128 + int(w.Signal())
		case ended == pid:
			status = w.ExitStatus()
		}
		if ended == pid {
			_ = unix.Kill(-1, unix.SIGKILL) // ESRCH if there is none
		}
	}
}
