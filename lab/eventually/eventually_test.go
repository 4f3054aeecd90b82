package eventually

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/lab/bubble"
)

// asked is a test that notes its failure.
type asked struct {
	*testing.T
	failure string
}

func (a *asked) Fatalf(format string, args ...any) { a.failure = fmt.Sprintf(format, args...) }

// in runs f in a bubble, and returns how f failed and how long it took.
func in(t *testing.T, f func(TB)) (failure string, took time.Duration) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		a, began := &asked{T: t}, time.Now()
		f(a)
		failure, took = a.failure, time.Since(began)
	})
	return failure, took
}

func TestPasses(t *testing.T) {
	after := func(d time.Duration) func() bool {
		began := time.Now()
		return func() bool { return time.Since(began) >= d }
	}
	for name, c := range map[string]struct {
		wait func(TB)
		most time.Duration
	}{
		"at once": {func(t TB) { True(t, "now", after(0)) }, 0},
		"soon":    {func(t TB) { True(t, "soon", after(2*time.Millisecond)) }, 4 * time.Millisecond},
		"late":    {func(t TB) { True(t, "late", after(base-time.Second)) }, base},
		"by design late": {func(t TB) {
			Taking(time.Minute).True(t, "late", after(time.Minute+base-time.Second))
		}, time.Minute + base},
		"a value": {func(t TB) {
			n := 0
			Equal(t, "counted", 3, func() int { n++; return n })
		}, 4 * time.Millisecond},
		"a channel": {func(t TB) {
			c := make(chan string)
			go func() {
				bubble.Work(time.Second)
				c <- "text"
			}()
			if got := Receive(t, "text", c); got != "text" {
				t.Fatalf("received %q", got)
			}
		}, time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			if failure, took := in(t, c.wait); failure != "" || took > c.most {
				t.Errorf("after %v: %s", took, failure)
			}
		})
	}
}

func TestFails(t *testing.T) {
	for name, c := range map[string]struct {
		wait func(TB)
		want string
	}{
		"true":     {func(t TB) { True(t, "the lamp is lit", func() bool { return false }) }, "the lamp is lit"},
		"equal":    {func(t TB) { Equal(t, "lamps", 2, func() int { return 1 }) }, "lamps: waited in vain for 2"},
		"the last": {func(t TB) { Nil(t, "lamp", func() error { return errors.New("it is dark") }) }, "last: it is dark"},
		"context": {func(t TB) {
			ctx, cancel := Context(context.Background())
			defer cancel()
			<-ctx.Done()
			t.Fatalf("%v", context.Cause(ctx))
		}, "waited in vain for 2"},
		"receive": {func(t TB) { Receive(t, "light", make(chan int)) }, "light: nothing came"},
	} {
		t.Run(name, func(t *testing.T) {
			failure, took := in(t, c.wait)
			if !strings.Contains(failure, c.want) || took < base || took > base+2*remeasure {
				t.Errorf("after %v: %s", took, failure)
			}
		})
	}
}

func TestPoll_endsWithTheContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		dark, began := errors.New("it is dark"), time.Now()
		err := Poll(ctx, func() error { return dark })
		if !errors.Is(err, dark) || !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != time.Second {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
	})
}

// While the machine is slow patience lasts longer, also if it becomes slow only later, and when it has been slow only
// at first.
func TestPatience_growsWithSlowness(t *testing.T) {
	for _, c := range []struct {
		first, then float64 // before and after 12 s
		lasts       time.Duration
	}{
		{1, 1, base},
		{4, 4, 4 * base},
		{1, 4, 12*time.Second + 4*8*time.Second},
		{4, 1, 12*time.Second + 17*time.Second},
	} {
		synctest.Test(t, func(t *testing.T) {
			p, began := begin(0), time.Now()
			p.slowness = func() float64 {
				if time.Since(began) <= 12*time.Second {
					return c.first
				}
				return c.then
			}
			for !p.over() {
				bubble.Pass(longest)
			}
			if lasted := time.Since(began); lasted < c.lasts || lasted > c.lasts+4*remeasure {
				t.Errorf("slow %v times, then %v times: patient for %v, want %v", c.first, c.then, lasted, c.lasts)
			}
		})
	}
}

func TestSlowness(t *testing.T) {
	if s := slowness(); s < 1 || s > slowest {
		t.Errorf("%v times", s)
	}
	if p := Patience(); p < 3*base || p > slowest*base {
		t.Errorf("patient for %v", p)
	}
}
