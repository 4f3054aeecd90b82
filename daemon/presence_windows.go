package daemon

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/windows"

	"fairlead.dev/fairlead/config"
)

// here is where there may be one Fairlead only.
const here = "on this machine"

// rival is another Fairlead.
type rival struct{ pid string }

func (r *rival) String() string { return "process " + r.pid }

// tryClaim keeps a file open that no other process can write meanwhile. The file has the number of this process.
func tryClaim() (io.Closer, *rival, error) {
	path := filepath.Join(config.DataDirectory(), "lock")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, nil, err
	}
	name, err := windows.UTF16PtrFromString(path)
	if err != nil {
		return nil, nil, err
	}
	file, err := windows.CreateFile(name, windows.GENERIC_WRITE, windows.FILE_SHARE_READ, nil, windows.CREATE_ALWAYS,
		windows.FILE_ATTRIBUTE_NORMAL, 0)
	if errors.Is(err, windows.ERROR_SHARING_VIOLATION) {
		text, err := os.ReadFile(path)
		return nil, &rival{strings.TrimSpace(string(text))}, err
	}
	if err != nil {
		return nil, nil, &fs.PathError{Op: "lock", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(file), path)
	_, err = fmt.Fprintln(f, os.Getpid())
	return f, nil, errors.Join(err, protect(filepath.Dir(path)))
}

// Alone returns an error that wraps ErrRunning if there is a Fairlead on this machine.
func Alone() error {
	l, other, err := tryClaim()
	if other != nil {
		return fmt.Errorf("%w (%s)", ErrRunning, other)
	}
	if l != nil {
		err = errors.Join(err, l.Close())
	}
	return err
}

// protect lets only the system and administrators at a directory and at what will be in it: in %ProgramData%, any user
// may have made it before.
func protect(dir string) error {
	access, err := windows.SecurityDescriptorFromString("O:BAD:PAI(A;OICI;FA;;;SY)(A;OICI;FA;;;BA)")
	if err != nil {
		return err
	}
	owner, _, err := access.Owner()
	if err != nil {
		return err
	}
	rules, _, err := access.DACL()
	if err != nil {
		return err
	}
	err = windows.SetNamedSecurityInfo(dir, windows.SE_FILE_OBJECT, windows.OWNER_SECURITY_INFORMATION|
		windows.DACL_SECURITY_INFORMATION|windows.PROTECTED_DACL_SECURITY_INFORMATION, owner, nil, rules, nil)
	if err != nil {
		return &fs.PathError{Op: "protect", Path: dir, Err: err}
	}
	return nil
}
