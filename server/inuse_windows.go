package server

import "golang.org/x/sys/windows"

const inUse = windows.WSAEADDRINUSE
