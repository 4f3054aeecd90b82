package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/study"
)

// progress is a line on a terminal that is written over, with a bar. Where standard error is no terminal it is a line
// for each part of the work, or none.
type progress struct {
	out  io.Writer
	bar  *progressbar.ProgressBar // nil: there is no terminal
	part string                   // the last one of which there was a line
}

func newProgress() *progress {
	p := &progress{out: os.Stderr}
	if _, err := unix.IoctlGetWinsize(int(os.Stderr.Fd()), unix.TIOCGWINSZ); err == nil {
		p.bar = progressbar.NewOptions(1, progressbar.OptionSetWriter(p.out), progressbar.OptionSetWidth(20),
			progressbar.OptionSetPredictTime(false), progressbar.OptionSetElapsedTime(false),
			progressbar.OptionShowDescriptionAtLineEnd(), progressbar.OptionSetRenderBlankState(false))
	}
	return p
}

// show says what is done now, and how much is over.
func (p *progress) show(doing string, n, of int) {
	if p.bar == nil {
		return
	}
	p.bar.ChangeMax(max(of, n, 1))
	p.bar.Describe(shortened(doing))
	_ = p.bar.Set(n) // a terminal that is gone is no reason to end
}

// shortened is what has room beside the bar.
func shortened(text string) string {
	const bar = 34
	size, err := unix.IoctlGetWinsize(int(os.Stderr.Fd()), unix.TIOCGWINSZ)
	if err != nil || size.Col == 0 {
		return text
	}
	if r, room := []rune(text), max(int(size.Col)-bar, 1); len(r) > room {
		return string(r[:room-1]) + "…"
	}
	return text
}

// measuring is show for advise.
func (p *progress) measuring(plane string, n, of int) {
	p.show(fmt.Sprintf("measuring %s (%d of %d)…", plane, n, of), n-1, of)
}

// follow is show for a study. Without a terminal there is a line for each cell.
func (p *progress) follow(s study.Progress) {
	left := ""
	if s.For > 0 {
		left = roughly(s.For) + " left, "
	}
	p.show(left+s.Doing, s.Done, s.Done+s.Left)
	if p.bar == nil && s.Cell != "" && s.Cell != p.part {
		p.part = s.Cell
		fmt.Fprintf(p.out, "fairlead: %s (%d of %d turns, %sat %s)\n", s.Cell, s.Done, s.Done+s.Left, left,
			time.Now().Format(time.TimeOnly))
	}
}

// roughly is a time that is only estimated.
func roughly(d time.Duration) string {
	if d < time.Minute {
		return fmt.Sprintf("%d s", max(1, int(d.Seconds())))
	}
	return fmt.Sprintf("%d min", int((d + time.Minute/2).Minutes()))
}

// say writes a line above the bar.
func (p *progress) say(what string) {
	p.clear()
	fmt.Fprintln(p.out, "fairlead:", what)
}

func (p *progress) clear() {
	if p.bar != nil {
		_ = p.bar.Clear()
	}
}
