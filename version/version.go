// Package version is which Fairlead this is. ./dev build stamps it:
//
//	git describe ─► go build -ldflags "-X …/version.stamped=v1.2.3" ─► String
package version

import (
	"runtime"
	"runtime/debug"
)

// stamped is what the linker says.
var stamped string //nolint:gochecknoglobals // the linker can set nothing else

// String is the version, as "v1.2.3", or as "v1.2.3-4-g0123456" between two releases. A program that go
// install or go build made by itself knows the version of its module, or only that it has none.
func String() string {
	if stamped != "" {
		return stamped
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(devel)"
}

// Line is what a program that is asked for its version answers.
func Line(program string) string {
	return program + " " + String() + " " + runtime.Version() + " " + runtime.GOOS + "/" + runtime.GOARCH
}
