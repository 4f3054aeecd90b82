package testbed

import (
	"errors"
	"os"
)

// ReplaceFile writes a file that readers see as a whole. If that fails, what was there before still is.
func ReplaceFile(path string, text []byte, mode os.FileMode) error {
	next := path + ".next"
	if err := os.WriteFile(next, text, mode); err != nil {
		return errors.Join(err, os.Remove(next))
	}
	return os.Rename(next, path)
}
