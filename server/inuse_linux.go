package server

import "golang.org/x/sys/unix"

const inUse = unix.EADDRINUSE
