package study_test

import (
	"os"
	"testing"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/programtest"
	"fairlead.dev/fairlead/lab/testbed/traffic"
)

// fairlead is the program that is compared with itself.
var fairlead string

func TestMain(m *testing.M) {
	traffic.Main()
	os.Exit(testbed.RunTests(func() int {
		return programtest.With(func(program string) int {
			fairlead = program
			return m.Run()
		})
	}))
}
