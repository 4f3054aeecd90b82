package cli

import (
	"os"

	"golang.org/x/sys/unix"
)

// Columns is how wide the terminal of the standard output is; 0: there is none.
func Columns() int {
	if size, err := unix.IoctlGetWinsize(int(os.Stdout.Fd()), unix.TIOCGWINSZ); err == nil {
		return int(size.Col)
	}
	return 0
}
