package conformance_test

import (
	"fmt"
	"os"
	"os/signal"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/programs"
	"fairlead.dev/fairlead/version"
)

// The program fairlead-cases is this package's tests.
func TestMain(m *testing.M) {
	vm.Guest()
	if slices.Equal(os.Args[1:], []string{"--version"}) {
		fmt.Println(version.Line(programs.Cases))
		os.Exit(0)
	}
	if unix.Getpgrp() == os.Getpid() {
		endAsGroup()
	}
	os.Exit(m.Run())
}

// endAsGroup has a SIGTERM end all that the tests have started, too. It tells of the end of fairlead verify.
func endAsGroup() {
	terminated := make(chan os.Signal, 1)
	signal.Notify(terminated, unix.SIGTERM)
	// The pipe of the output breaks a moment earlier, which would end the tests alone.
	signal.Notify(make(chan os.Signal, 1), unix.SIGPIPE)
	go func() {
		<-terminated
		_ = unix.Kill(0, unix.SIGKILL)
	}()
}
