package socket

import (
	"errors"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	pipeFiles = 2
	pipeSize  = 1 << 20 // bytes, if the kernel allows so much
	maxKept   = 16      // unused pipes
	flags     = unix.SPLICE_F_NONBLOCK | unix.SPLICE_F_MOVE
)

// pipe is a way past the memory of the process.
type pipe struct{ r, w int }

// pipes are those that no connection uses at the moment.
type pipes struct {
	mu   sync.Mutex
	kept []pipe
}

func (p *pipes) take() (pipe, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if last := len(p.kept) - 1; last >= 0 {
		one := p.kept[last]
		p.kept = p.kept[:last]
		return one, nil
	}
	var ends [2]int
	if err := unix.Pipe2(ends[:], unix.O_NONBLOCK|unix.O_CLOEXEC); err != nil {
		return pipe{}, os.NewSyscallError("pipe2", err)
	}
	_, _ = unix.FcntlInt(uintptr(ends[0]), unix.F_SETPIPE_SZ, pipeSize) // a smaller one takes more calls
	return pipe{ends[0], ends[1]}, nil
}

// put gives an empty pipe back.
func (p *pipes) put(one pipe) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.kept) < maxKept {
		p.kept = append(p.kept, one)
		return
	}
	one.close()
}

func (p *pipes) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, one := range p.kept {
		one.close()
	}
	p.kept = nil
}

func (p pipe) close() {
	unix.Close(p.r)
	unix.Close(p.w)
}

// splice moves a stream past the memory of the process until it pauses, or for a while, if there is a pipe for it.
func (d *direction) splice() (ended bool, err error) {
	back := d.Borrow(pipeFiles)
	if back == nil {
		return false, nil
	}
	defer back()
	p, err := d.copier.pipes.take()
	if err != nil {
		return false, nil //nolint:nilerr // there is another way
	}
	ended, err = d.through(p)
	d.Touch()
	if err == nil {
		d.copier.pipes.put(p)
	} else {
		p.close() // with what is in it
	}
	return ended, err
}

func (d *direction) through(p pipe) (ended bool, err error) {
	_ = d.from.SetReadDeadline(time.Now().Add(lull)) // fails only if the connection is over
	for copied := 0; copied < bulk; {
		n, err := d.fill(p)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return false, nil
		case err != nil || n == 0:
			return err == nil, err
		}
		if err := d.drain(p, n); err != nil {
			return false, err
		}
		copied += n
		d.sum.Add(0, n)
	}
	return false, nil
}

// fill moves what there is into an empty pipe.
func (d *direction) fill(p pipe) (n int, err error) {
	failed := d.from.raw.Read(func(fd uintptr) bool {
		n, err = spliced(int(fd), p.w, pipeSize)
		return !errors.Is(err, unix.EAGAIN)
	})
	return n, errors.Join(failed, err)
}

// drain moves what is in the pipe to the other side. It has a deadline only where that does not take all at once.
func (d *direction) drain(p pipe, n int) error {
	for waits := false; n > 0; {
		var m int
		var err error
		failed := d.to.raw.Write(func(fd uintptr) bool {
			m, err = spliced(p.r, int(fd), n)
			return !waits || !errors.Is(err, unix.EAGAIN)
		})
		if errors.Is(err, unix.EAGAIN) && failed == nil {
			waits = true
			_ = d.to.SetWriteDeadline(time.Now().Add(d.copier.idle)) // fails only if the connection is over
			defer func() { _ = d.to.SetWriteDeadline(time.Time{}) }()
			continue
		}
		if err = errors.Join(failed, err); err != nil {
			return err
		}
		n -= m
	}
	return nil
}

func spliced(from, to, n int) (int, error) {
	for {
		m, err := unix.Splice(from, nil, to, nil, n, flags)
		if !errors.Is(err, unix.EINTR) {
			return int(m), os.NewSyscallError("splice", err)
		}
	}
}
