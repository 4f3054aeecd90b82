package share

import "golang.org/x/sys/unix"

// maxReserve is how many files are kept for the process itself, or a quarter of all if that is less. It needs them to
// follow the cluster, to program the kernel, and to report its state.
const maxReserve = 512

// Files is how many files the process may open.
func Files() int {
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) != nil {
		return 1024 // the usual default
	}
	return int(min(limit.Cur, 1<<30))
}

// Reserve is how many of them are not for clients.
func Reserve() int { return reserve(Files()) }

func reserve(files int) int { return min(maxReserve, files/4) }

// Scarce reports whether a file is among the last that the process may have: within the reserve, or a part of it. The
// kernel hands out the lowest number that is free, so a number tells how many there are.
func Scarce(fd, part int) bool {
	files := Files()
	return fd+reserve(files)/part >= files
}
