package testbed

import (
	"errors"
	"os"
	"path/filepath"
)

// ReplaceFile writes a file that readers see as a whole. If that fails, what was there before still is.
func ReplaceFile(path string, text []byte, mode os.FileMode) error {
	next, err := os.CreateTemp(filepath.Dir(path), ".*.tmp")
	if err != nil {
		return err
	}
	defer os.Remove(next.Name()) // after the rename there is no such file
	_, err = next.Write(text)
	if err := errors.Join(err, next.Chmod(mode), next.Close()); err != nil {
		return err
	}
	return os.Rename(next.Name(), path)
}
