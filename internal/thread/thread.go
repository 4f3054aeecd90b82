// Package thread runs functions on operating system threads of their own: what such a function does to its thread, its
// network namespace above all, reaches no other goroutine.
//
//	Run ─► a goroutine ─ on the main thread? ─ yes ─► it keeps that busy while another goroutine begins
//	                              └ no ─► f, and then the thread ends
package thread

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// Run begins f on a thread that ends with it, and returns at once. That is never the main thread of the process: Go
// cannot end it, so the changes by f would stay. And /proc/PID shows the main thread's namespaces as those of the
// process.
func Run(f func()) {
	go func() {
		runtime.LockOSThread() // for good: a goroutine that ends while locked ends its thread
		if unix.Gettid() != unix.Getpid() {
			f()
			return
		}
		elsewhere := make(chan struct{})
		go func() {
			runtime.LockOSThread()
			close(elsewhere)
			f()
		}()
		<-elsewhere
		runtime.UnlockOSThread()
	}()
}
