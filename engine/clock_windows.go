package engine

import (
	"time"
	"unsafe"

	"golang.org/x/sys/windows"
)

//nolint:gochecknoglobals // it is only read, and finds the function once
var getThreadTimes = windows.NewLazySystemDLL("kernel32.dll").NewProc("GetThreadTimes")

// processorTime is that of the calling thread; if the kernel does not tell, no time goes by.
func processorTime() time.Duration {
	var created, exited, kernel, user windows.Filetime
	ok, _, _ := getThreadTimes.Call(uintptr(windows.CurrentThread()), uintptr(unsafe.Pointer(&created)),
		uintptr(unsafe.Pointer(&exited)), uintptr(unsafe.Pointer(&kernel)), uintptr(unsafe.Pointer(&user)))
	if ok == 0 {
		return 0
	}
	const tick = 100 * time.Nanosecond
	ticks := func(f windows.Filetime) int64 { return int64(f.HighDateTime)<<32 | int64(f.LowDateTime) }
	return time.Duration(ticks(kernel)+ticks(user)) * tick
}
