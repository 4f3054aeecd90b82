package cli

import (
	"os"

	"golang.org/x/sys/windows"
)

// Columns is how wide the terminal of the standard output is; 0: there is none.
func Columns() int {
	var info windows.ConsoleScreenBufferInfo
	if windows.GetConsoleScreenBufferInfo(windows.Handle(os.Stdout.Fd()), &info) != nil {
		return 0
	}
	return int(info.Window.Right-info.Window.Left) + 1
}
