package bench

import (
	"errors"
	"fmt"
	"io"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// betweenTwo is the name of what a couple does.
const betweenTwo = "requests per second, between two threads"

// couple is a connection whose ends have a thread and a processor each.
type couple struct {
	client      *client
	here, there int
}

func (c *client) openCouple() (*couple, error) {
	o := &couple{client: c, here: -1, there: -1}
	err := c.bed.Do(c.place, func() (err error) {
		if err := blockSignals(); err != nil {
			return err
		}
		if o.here, o.there, err = c.open(); err != nil {
			return err
		}
		return errors.Join(wait(o.here), wait(o.there))
	})
	if err != nil {
		o.close()
		return nil, err
	}
	return o, nil
}

func (o *couple) close() {
	unix.Close(o.here)
	unix.Close(o.there)
}

// wait has a socket wait for what it reads or writes, for some seconds.
func wait(fd int) error {
	patience := &unix.Timeval{Sec: 5}
	return errors.Join(unix.SetNonblock(fd, false),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, patience),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, patience))
}

// slice has the server answer requests, and returns what each took the client.
func (o *couple) slice() (took []time.Duration, err error) {
	const n = requests + requests/unheated
	answered := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // for good, so that the thread ends with the goroutine
		answered <- onProcessor(1, func() error {
			buffer := make([]byte, requestBytes)
			for range n {
				if err := errors.Join(receive(o.there, buffer), send(o.there, buffer)); err != nil {
					return err
				}
			}
			return nil
		})
	}()
	err = o.client.bed.Do(o.client.place, func() error {
		return onProcessor(0, func() error {
			buffer := make([]byte, requestBytes)
			for range n {
				begin := time.Now()
				if err := errors.Join(send(o.here, buffer), receive(o.here, buffer)); err != nil {
					return err
				}
				took = append(took, time.Since(begin))
			}
			return nil
		})
	})
	if err := errors.Join(err, <-answered); err != nil {
		return nil, fmt.Errorf("%s: %w", betweenTwo, err)
	}
	return took[requests/unheated:], nil
}

func send(fd int, b []byte) error {
	n, err := unix.Write(fd, b)
	if err == nil && n < len(b) {
		err = io.ErrShortWrite
	}
	if err != nil {
		return fmt.Errorf("write: %w", err)
	}
	return nil
}

// receive reads what the other end has written at once.
func receive(fd int, b []byte) error {
	n, err := unix.Read(fd, b)
	if err == nil && n < len(b) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return fmt.Errorf("read: %w", err)
	}
	return nil
}

// onProcessor does something on the n-th of the processors that this thread may use, counted from 0. Where there are fewer,
// several share one. The thread stays there.
func onProcessor(n int, f func() error) error {
	var all, one unix.CPUSet
	if err := errors.Join(blockSignals(), unix.SchedGetaffinity(0, &all)); err != nil {
		return fmt.Errorf("which processors there are: %w", err)
	}
	n %= all.Count()
	cpu := 0
	for ; !all.IsSet(cpu) || n > 0; cpu++ {
		if all.IsSet(cpu) {
			n--
		}
	}
	one.Set(cpu)
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		return fmt.Errorf("stay on a processor: %w", err)
	}
	return f()
}
