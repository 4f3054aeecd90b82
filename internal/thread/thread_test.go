package thread_test

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/thread"
)

// TestRun begins functions at the same time, so that each thread has one; none of them has the main thread.
func TestRun(t *testing.T) {
	const n = 100
	ids, end := make(chan int), make(chan struct{})
	for range n {
		thread.Run(func() {
			ids <- unix.Gettid()
			<-end
		})
	}
	seen := map[int]bool{}
	for range n {
		seen[<-ids] = true
	}
	close(end)
	if len(seen) != n || seen[os.Getpid()] {
		t.Errorf("%d functions have %d threads; one is the main thread: %t", n, len(seen), seen[os.Getpid()])
	}
}
