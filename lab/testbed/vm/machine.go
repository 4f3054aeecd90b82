package vm

import (
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Machine runs one command. Only Args is needed.
type Machine struct {
	Args           []string  // the command, which is root there, with our environment and working directory
	Stdout, Stderr io.Writer // nil to discard
	Shared         []string  // directories in which it writes the machine's own files; everything else is forgotten
	Memory         string    // at most, as 512M or 4G (the default); what is not used costs nothing
	Kernel         string    // the file, if not what Find finds
}

// request is what process 1 is asked to do.
type request struct {
	Args, Env, Shared []string
	Dir               string
}

// message is what comes back: output, until there is an exit status.
type message struct {
	Stdout, Stderr []byte
	Ended          bool
	Status         int
}

// requestVariable is set in the environment of process 1, and names the file with the request.
const requestVariable = "FAIRLEAD_GUEST"

// Run runs the command and returns its exit status, 128 and the number of the signal if one killed it.
// The error says why there is none: the context has ended, the command is no program, or the kernel has
// crashed, with the last of what that printed. Nothing goes on after Run, nor after this process if that
// is killed.
func (m Machine) Run(ctx context.Context) (status int, err error) {
	if m.Kernel == "" {
		if m.Kernel, err = Find(); err != nil {
			return 0, err
		}
	}
	if m.Memory == "" {
		m.Memory = "4G"
	}
	size, err := parseSize(m.Memory)
	if err != nil {
		return 0, err
	}
	dir, err := m.prepare()
	defer os.RemoveAll(dir)
	if err != nil {
		return 0, fmt.Errorf("prepare the test kernel: %w", err)
	}
	ctx, powerOff := context.WithCancel(ctx)
	defer powerOff()
	p, err := m.boot(ctx, dir, memoryDir(size))
	if err != nil {
		return 0, fmt.Errorf("start the test kernel: %w", err)
	}
	status, err = m.listen(p.console)
	interrupted := context.Cause(ctx)
	crashed := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
	if !crashed { // else it has something to print
		powerOff()
	}
	p.wait()
	switch {
	case err == nil:
		return status, nil
	case interrupted != nil:
		return 0, fmt.Errorf("the test kernel was ended before the command: %w", interrupted)
	case crashed:
		return 0, fmt.Errorf("the test kernel ended before the command (%v), having printed\n%s",
			p.cmd.ProcessState, p.log.bytes)
	}
	return 0, fmt.Errorf("pass the command's output on: %w", err)
}

// prepare makes a directory with what the guest is to know. Its name has to be simple, for it becomes
// part of the kernel's command line; other names reach the guest in files and links.
func (m Machine) prepare() (dir string, err error) {
	r := request{Args: m.Args, Env: os.Environ()}
	if r.Dir, err = os.Getwd(); err != nil {
		return "", err
	}
	for _, s := range m.Shared {
		full, err := sharedDir(s)
		if err != nil {
			return "", err
		}
		r.Shared = append(r.Shared, full)
	}
	if dir, err = os.MkdirTemp(VisibleTemp(), "fairlead-guest-"); err != nil {
		return "", err
	}
	if strings.ContainsAny(dir, " \t\n,\"") {
		return dir, fmt.Errorf("%s: a kernel's command line takes no such name; set TMPDIR", dir)
	}
	self, err := os.Executable()
	if err != nil {
		return dir, err
	}
	if err := os.Symlink(self, filepath.Join(dir, "init")); err != nil {
		return dir, err
	}
	f, err := os.Create(filepath.Join(dir, "request"))
	if err != nil {
		return dir, err
	}
	return dir, errors.Join(gob.NewEncoder(f).Encode(r), f.Close())
}

// sharedDir is the directory's name as the guest will know it.
func sharedDir(name string) (string, error) {
	full, err := filepath.Abs(name)
	if err == nil {
		full, err = filepath.EvalSymlinks(full)
	}
	if err != nil {
		return "", fmt.Errorf("shared directory %s: %w", name, err)
	}
	if info, err := os.Stat(full); err != nil || !info.IsDir() || full == "/" {
		return "", fmt.Errorf("shared directory %s: not a directory, or all of them", name)
	}
	return full, nil
}

// VisibleTemp is the directory for temporary files, unless the guest has another one of that name.
func VisibleTemp() string {
	dir, err := filepath.Abs(os.TempDir())
	if err != nil || strings.HasPrefix(dir+"/", "/dev/") || strings.HasPrefix(dir+"/", "/run/") {
		return "/tmp"
	}
	return dir
}

// process is the kernel that runs.
type process struct {
	cmd     *exec.Cmd
	console *os.File // what process 1 sends
	log     *tail    // what the kernel prints
	cpu     *os.File // the lock on a CPU, if any
}

// boot starts the kernel as process 1 of a new PID namespace: all of a User-Mode Linux's processes end with it, and it
// ends with ours. A user without that right has it in a new user namespace.
func (m Machine) boot(ctx context.Context, dir, memory string) (*process, error) {
	runtime.LockOSThread() // until wait: the end of the thread is what Pdeathsig is about
	p, err := m.start(ctx, dir, memory, &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID})
	if errors.Is(err, unix.EPERM) {
		p, err = m.start(ctx, dir, memory, &syscall.SysProcAttr{
			Cloneflags:  unix.CLONE_NEWPID | unix.CLONE_NEWUSER,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: os.Getuid(), HostID: os.Getuid(), Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: os.Getgid(), HostID: os.Getgid(), Size: 1}},
		})
	}
	if err != nil {
		runtime.UnlockOSThread()
	}
	return p, err
}

func (m Machine) start(ctx context.Context, dir, memory string, attr *syscall.SysProcAttr) (*process, error) {
	console, write, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer write.Close()
	attr.Pdeathsig, attr.Setsid = unix.SIGKILL, true // Ctrl-C is for us
	p := &process{console: console, log: &tail{limit: 64 << 10}}
	p.cmd = exec.CommandContext(ctx, m.Kernel, m.commandLine(dir)...)
	p.cmd.Env = []string{"PATH=/usr/bin:/bin", "HOME=/", "TMPDIR=" + memory}
	p.cmd.Stdout, p.cmd.Stderr = p.log, p.log
	p.cmd.ExtraFiles = []*os.File{write} // descriptor 3
	p.cmd.SysProcAttr = attr
	p.cmd.WaitDelay = 5 * time.Second
	pin, err := takeCPU()
	if err != nil {
		console.Close()
		return nil, err
	}
	p.cpu = pin.lock
	err = p.cmd.Start()
	pin.release()
	if err != nil {
		console.Close()
		p.cpu.Close()
		return nil, err
	}
	return p, nil
}

// commandLine: nothing of the kernel's own on a terminal, whose settings it would change; its console
// is descriptor 1, and the second one our line to process 1. Unknown words with "=" are for that.
func (m Machine) commandLine(dir string) []string {
	return []string{
		"mem=" + m.Memory, "seccomp=auto", "quiet", "noreboot", "panic=-1", "dummy.numdummies=0",
		"root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro",
		"con=null", "con0=null,fd:1", "con1=null,fd:3", "ssl=null",
		"uml_dir=" + dir, "umid=uml",
		"init=" + filepath.Join(dir, "init"), requestVariable + "=" + filepath.Join(dir, "request"),
	}
}

// listen passes the command's output on and returns its exit status.
func (m Machine) listen(console io.Reader) (status int, err error) {
	d := gob.NewDecoder(console)
	for {
		var got message
		if err := d.Decode(&got); err != nil {
			return 0, err
		}
		if got.Ended {
			return got.Status, nil
		}
		if err := errors.Join(pass(m.Stdout, got.Stdout), pass(m.Stderr, got.Stderr)); err != nil {
			return 0, err
		}
	}
}

func pass(w io.Writer, output []byte) error {
	if w == nil || len(output) == 0 {
		return nil
	}
	_, err := w.Write(output)
	return err
}

// wait waits for the end; how it ended is in the command's state.
func (p *process) wait() {
	_ = p.cmd.Wait()
	runtime.UnlockOSThread()
	p.cpu.Close()
	p.console.Close()
}

// memoryDir is where the guest's memory is a file. It is in memory, if that is large enough and may hold programs (in
// containers it often is neither). Else it is on the disk, which is slower.
func memoryDir(size uint64) string {
	const shm = "/dev/shm"
	var fs unix.Statfs_t
	if unix.Statfs(shm, &fs) != nil || fs.Flags&unix.MS_NOEXEC != 0 || unix.Access(shm, unix.W_OK) != nil {
		return os.TempDir()
	}
	if fs.Bavail*uint64(fs.Bsize) < size {
		return os.TempDir()
	}
	return shm
}

// parseSize reads a size as the kernel writes it.
func parseSize(text string) (bytes uint64, err error) {
	unit := strings.TrimLeft(text, "0123456789")
	n, err := strconv.ParseUint(strings.TrimSuffix(text, unit), 10, 32)
	shift, known := map[string]int{"": 0, "K": 10, "M": 20, "G": 30}[unit]
	if err != nil || !known {
		return 0, fmt.Errorf("%s is no size of memory, as 512M or 4G", text)
	}
	return n << shift, nil
}

// tail keeps the end of what is written.
type tail struct {
	bytes []byte
	limit int
}

func (t *tail) Write(b []byte) (int, error) {
	t.bytes = append(t.bytes, b...)
	t.bytes = t.bytes[max(0, len(t.bytes)-t.limit):]
	return len(b), nil
}
