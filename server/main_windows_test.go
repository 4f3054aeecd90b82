package server_test

import "golang.org/x/sys/windows"

const (
	inUse   = windows.WSAEADDRINUSE
	refused = windows.WSAECONNREFUSED
)
