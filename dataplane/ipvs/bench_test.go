package ipvs_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/ipvs"
	"fairlead.dev/fairlead/internal/thread"
	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/model"
)

// BenchmarkAudit looks at N Services of two backends each, which have not changed. adopt is the Sync of a process that
// finds them. read is the control, the kernel's own listing of the same as text.
//
//	./dev vm-test ./dataplane/ipvs -test.run XXX -test.bench Audit
func BenchmarkAudit(b *testing.B) {
	for _, services := range []int{100, 1000, 20_000} {
		benchmarkAlone(b, func() error { return benchmarkAudit(b, services) })
	}
}

// BenchmarkLargeGoes removes a Service with so many backends, and makes it again. The kernel looks for a real server among
// all of its Service, so a request for each of them takes the square of their number; the plane makes one request.
//
//	./dev vm-test ./dataplane/ipvs -test.run XXX -test.bench LargeGoes
func BenchmarkLargeGoes(b *testing.B) {
	for _, backends := range []int{1000, 4000} {
		benchmarkAlone(b, func() error {
			p, err := ipvs.New(ipvs.Options{})(dataplane.Config{})
			if err != nil {
				return err
			}
			defer p.Close()
			state, err := model.ParseState(large(backends))
			if err != nil {
				return err
			}
			none := model.NewState()
			b.Run(fmt.Sprint(backends), func(b *testing.B) {
				var goes, comes time.Duration
				for b.Loop() {
					start := time.Now()
					err := p.Sync(context.Background(), state)
					made := time.Now()
					if err = errors.Join(err, p.Apply(context.Background(), none, model.Diff(state, none))); err != nil {
						b.Error(err)
					}
					comes, goes = comes+made.Sub(start), goes+time.Since(made)
				}
				b.ReportMetric(goes.Seconds()/comes.Seconds(), "goes/comes")
			})
			return nil
		})
	}
}

// benchmarkAlone runs f in a network namespace of its own.
func benchmarkAlone(b *testing.B, f func() error) {
	if _, err := ipvs.New(ipvs.Options{})(dataplane.Config{}); errors.Is(err, dataplane.ErrUnsupported) {
		lack.Skip(b, lack.IPVS, err)
	}
	done := make(chan struct{})
	thread.Run(func() {
		defer close(done)
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = exec.Command("ip", "link", "set", "lo", "up").Run()
		}
		if err == nil {
			err = f()
		}
		if err != nil {
			b.Error(err)
		}
	})
	<-done
}

func benchmarkAudit(b *testing.B, services int) error {
	var text strings.Builder
	text.WriteString("guard 10.96.0.0/12 drop\n")
	for i := range services {
		at := fmt.Sprintf("%d.%d", i/250, 1+i%250)
		fmt.Fprintf(&text, "frontend 10.96.%s:80/tcp any forward s%d:http cluster snat never\n", at, i)
		fmt.Fprintf(&text, "backend s%d:http cluster 10.244.%s:80\nbackend s%d:http cluster 10.245.%s:80\n", i, at, i, at)
	}
	state, err := model.ParseState(text.String())
	if err != nil {
		return err
	}
	p, err := ipvs.New(ipvs.Options{})(dataplane.Config{})
	if err != nil {
		return err
	}
	defer p.Close()
	if err := p.Sync(context.Background(), state); err != nil {
		return err
	}
	look := func() {
		if report, err := p.Audit(context.Background(), state, dataplane.Quick); err != nil || len(report.Drifts) > 0 {
			b.Error(report.Drifts, err)
		}
	}
	listing, err := os.Open("/proc/thread-self/net/ip_vs") // of this namespace, whoever reads it
	if err != nil {
		return err
	}
	defer listing.Close()
	read := func() {
		if _, err := io.Copy(io.Discard, io.NewSectionReader(listing, 0, 1<<30)); err != nil {
			b.Error(err)
		}
	}
	adopt := func() {
		if err := p.Sync(context.Background(), state); err != nil {
			b.Error(err)
		}
	}
	for name, f := range map[string]func(){"audit": look, "read": read, "adopt": adopt} {
		b.Run(fmt.Sprintf("%s/%d", name, services), func(b *testing.B) {
			for b.Loop() {
				f()
			}
		})
	}
	return nil
}
