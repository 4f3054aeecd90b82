package server_test

import (
	"os"
	"syscall"
	"testing"

	"fairlead.dev/fairlead/lab/testbed"
)

const (
	inUse   = syscall.EADDRINUSE
	refused = syscall.ECONNREFUSED
)

func TestMain(m *testing.M) { os.Exit(testbed.RunTests(m.Run)) }
