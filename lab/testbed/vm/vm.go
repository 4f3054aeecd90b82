// Package vm runs programs in a Linux of their own, the test kernel. It has everything that a proxy needs of a kernel,
// whatever the machine's own one lacks, and private rules and addresses. It is a User-Mode Linux, an ordinary process
// that needs neither root nor a disk image.
//
//	Replay (a test, again) ─┐
//	vmrun (any command) ────┴► Machine.Run ─► kernel's process ─► Guest: this program, as process 1 ─► command
//	                                 ▲                                │ output, exit status                │
//	                                 └──────────── console 1 ◄────────┴────────────────────────────────────┘
//
// The guest sees the machine's files. Everything that it writes is kept in its own memory, but for directories that are
// shared with it. Programs with Machine or Replay in them call Guest first of all (testbed.Reexec does); process 1 is
// the same program.
//
// The file build compiles it with the settings in the file config, for the user's cache.
package vm

import (
	"crypto/sha256"
	_ "embed" // config and build
	"fmt"
	"os"
	"path/filepath"
)

// Variable names the environment variable that names a kernel, instead of the one in the cache.
const Variable = "FAIRLEAD_TEST_KERNEL"

//go:embed config
var config string

//go:embed build
var build string

// Find returns the file of the test kernel: a User-Mode Linux with what config lists.
func Find() (string, error) {
	file := os.Getenv(Variable)
	if file == "" {
		cache, err := cacheDir()
		if err != nil {
			return "", err
		}
		hash := sha256.Sum256([]byte(config + build))
		file = filepath.Join(cache, fmt.Sprintf("kernel-%x", hash[:8]))
	}
	if _, err := os.Stat(file); err != nil {
		return "", fmt.Errorf("no test kernel (./dev kernel builds it, %s names one): %w", Variable, err)
	}
	return filepath.Abs(file)
}

func cacheDir() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	return filepath.Join(cache, "fairlead"), nil
}
