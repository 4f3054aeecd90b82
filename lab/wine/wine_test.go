package wine

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/lack"
)

const (
	wine64     = "/usr/lib/wine/wine64"
	wineserver = "/usr/lib/wine/wineserver64"
)

// windows is a Windows of Wine's: a directory that its programs have for themselves.
type windows struct {
	dir string
	env []string
}

// newWindows copies the directory that ./dev has prepared: programs of several tests would meet in one, at the service
// manager and in %ProgramData%.
func newWindows(t *testing.T) *windows {
	t.Helper()
	prepared := os.Getenv("FAIRLEAD_WINE")
	if prepared == "" {
		lack.Skip(t, lack.Wine, "FAIRLEAD_WINE names no directory")
	}
	w := &windows{dir: filepath.Join(t.TempDir(), "wine")}
	if out, err := exec.Command("cp", "-dR", "--preserve=mode,timestamps", prepared, w.dir).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	w.env = append(os.Environ(), "WINEPREFIX="+w.dir, "WINEDEBUG=-all")
	t.Cleanup(w.end)
	return w
}

// end ends all programs.
func (w *windows) end() {
	for _, argument := range []string{"-k", "-w"} { // kill, and wait
		c := exec.Command(wineserver, argument)
		c.Env = w.env
		_ = c.Run() // there may be none
	}
}

// path is a file's name in Windows.
func path(file string) string { return `Z:` + strings.ReplaceAll(file, "/", `\`) }

// command runs a program. Its output goes to a file: Wine's services inherit it, and would keep a pipe open.
func (w *windows) command(t *testing.T, program string, args ...string) (c *exec.Cmd, output func() string) {
	t.Helper()
	file, err := os.CreateTemp(t.TempDir(), "output")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { file.Close() })
	c = exec.Command(wine64, append([]string{program}, args...)...)
	c.Env, c.Stdout, c.Stderr = w.env, file, file
	return c, func() string {
		text, err := os.ReadFile(file.Name())
		if err != nil {
			t.Error(err)
		}
		return strings.ReplaceAll(string(text), "\r", "")
	}
}

// run runs a program to its end.
func (w *windows) run(t *testing.T, program string, args ...string) (string, error) {
	t.Helper()
	c, output := w.command(t, program, args...)
	err := c.Run()
	if err != nil {
		err = fmt.Errorf("%s: %w\n%s", args, err, output())
	}
	return output(), err
}
