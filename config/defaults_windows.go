package config

import (
	"cmp"
	"os"
	"path/filepath"
)

// DataDirectory is where the agent keeps what outlives a process.
func DataDirectory() string {
	return filepath.Join(cmp.Or(os.Getenv("ProgramData"), `C:\ProgramData`), "Fairlead")
}

// defaultControlSocket is the file that has address and token of the server for commands.
func defaultControlSocket() string { return filepath.Join(DataDirectory(), "control") }
