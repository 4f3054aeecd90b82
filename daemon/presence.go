package daemon

import (
	"errors"
	"net"

	"golang.org/x/sys/unix"
)

// presence is an abstract Unix socket. It belongs to the network namespace, whatever else containers
// do not share, and vanishes with its process: who cleans up sees that somebody would put all of it back.
const presence = "@fairlead"

// ErrRunning says that a Fairlead runs in this network namespace.
var ErrRunning = errors.New("a Fairlead runs here, and would put back what is removed; stop it first")

// announce tells others in this network namespace of this process until it is closed. A second process
// need not: the first one does.
func announce() (net.Listener, error) {
	l, err := net.Listen("unix", presence)
	if errors.Is(err, unix.EADDRINUSE) {
		err = ErrRunning
	}
	return l, err
}

// Alone returns ErrRunning if there is a Fairlead in this network namespace.
func Alone() error {
	l, err := announce()
	if err != nil {
		return err
	}
	return l.Close()
}
