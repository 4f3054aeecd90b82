package traffic

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// The kinds of errors in Result.Errors. "status" and a number is an answer of HTTP with another status than 200;
// whatever else there may be is its own text.
const (
	// Refused: a reset, or "port unreachable", came instead of a connection.
	Refused = "refused"
	// Reset: what was there has been ended by others before its time.
	Reset = "reset"
	// TimedOut: nothing came in Load.Timeout.
	TimedOut = "timed out"
	// Unreachable: ICMP said that the packet cannot be delivered there.
	Unreachable = "unreachable"
	// NoSource: no port is left to connect from.
	NoSource = "no source port"
)

// statusError is an answer with another status than 200.
type statusError int

func (s statusError) Error() string { return fmt.Sprintf("status %d", int(s)) }

// kind classifies an error.
func kind(err error) string {
	for _, k := range []struct {
		name string
		is   []error
	}{
		{Refused, []error{unix.ECONNREFUSED}},
		{Reset, []error{unix.ECONNRESET, unix.ECONNABORTED, unix.EPIPE, io.EOF, io.ErrUnexpectedEOF}},
		{TimedOut, []error{
			os.ErrDeadlineExceeded, context.DeadlineExceeded, unix.ETIMEDOUT, unix.EAGAIN, unix.EINPROGRESS,
		}},
		{Unreachable, []error{unix.EHOSTUNREACH, unix.ENETUNREACH, unix.EACCES, unix.EHOSTDOWN, unix.EPERM}},
		{NoSource, []error{unix.EADDRNOTAVAIL, unix.EADDRINUSE}},
	} {
		if slices.ContainsFunc(k.is, func(target error) bool { return errors.Is(err, target) }) {
			return k.name
		}
	}
	var status statusError
	if errors.As(err, &status) {
		return status.Error()
	}
	var number unix.Errno
	if errors.As(err, &number) { // without the addresses that it was about
		return number.Error()
	}
	return err.Error()
}
