package attack

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
)

// changes are those that the victim makes one after the other: an endpoint is replaced, a Service comes and goes.
type changes struct {
	s    *stage
	stop context.CancelFunc
	over chan struct{}

	mu    sync.Mutex
	made  []change
	under change // way, and how long it is known to have lasted
	err   error  // that keeps it from going on
}

// change is one of them, and how long it took until clients met what it says.
type change struct {
	what  string
	began time.Time
	took  time.Duration
}

func (c change) String() string {
	return fmt.Sprintf("%s after %s", c.what, c.took.Round(time.Millisecond))
}

const (
	changePause = 200 * time.Millisecond // between two, so that the proxy need not rest
	looksEvery  = 20 * time.Millisecond  // whether one is in effect
	lookTime    = time.Second            // how long a look may take
	maxLooks    = 50                     // at the same time
	givenUp     = 15 * time.Second       // how long one is waited for; after that no other is
)

// change begins to make them.
func (s *stage) change() *changes {
	ctx, stop := context.WithCancel(s.Context())
	c := &changes{s: s, stop: stop, over: make(chan struct{})}
	go func() {
		defer close(c.over)
		pause := time.NewTicker(changePause)
		defer pause.Stop()
		for n := 0; ctx.Err() == nil; n++ {
			if err := c.make(ctx, n); err != nil && ctx.Err() == nil {
				c.mu.Lock()
				c.err = err
				c.mu.Unlock()
				return
			}
			<-pause.C
		}
	}()
	s.Cleanup(c.end)
	return c
}

func (c *changes) end() {
	c.stop()
	<-c.over
}

// make makes the change of a number. In turn an endpoint is replaced, a Service added, the endpoint replaced again, and
// the Service removed.
func (c *changes) make(ctx context.Context, n int) error {
	who := []testbed.Place{"web-1", "web-2"}[n/2%2]
	svc, what, pods := numbered(swapNumber), "endpoint replaced", []testbed.Place{who}
	switch n % 4 {
	case 1:
		svc, what = numbered(addedNumber), "Service added"
	case 3:
		svc, what, pods = numbered(addedNumber), "Service removed", nil
	}
	to := ways[0].address(c.s, swapNumber)
	if n%2 == 1 {
		to = ways[0].address(c.s, addedNumber)
	}
	var objects []runtime.Object
	if pods != nil {
		objects = append(c.s.of(svc, pods...), svc)
	}
	c.begin(what)
	if err := c.s.objects.set("victim-"+svc.Name, objects); err != nil {
		return err
	}
	return c.await(func() (bool, error) {
		o, err := c.s.bed.Probe(ctx, testbed.Probe{From: client, To: to, Timeout: lookTime})
		if pods == nil {
			return !strings.HasPrefix(o.Backend, "web-"), err
		}
		return o.Backend == string(who), err
	})
}

func (c *changes) begin(what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.under = change{what: what, began: time.Now()}
}

// await looks again and again until the change is in effect, or is given up. It took until the first look began that found
// it so. That is known when the looks under way have ended: what is not served is not answered, and a look at it takes
// its time.
func (c *changes) await(look func() (bool, error)) error {
	type found struct {
		began time.Time
		is    bool
		err   error
	}
	looks, pending := make(chan found, maxLooks), 0
	var not, is time.Time // when the last look began that found it not so, and the first one after it that found it so
	pace := time.NewTicker(looksEvery)
	defer pace.Stop()
	for {
		select {
		case <-pace.C:
			if took := time.Since(c.under.began); took > givenUp {
				c.ended(took)
				return nil
			}
			if pending == maxLooks || !is.IsZero() {
				continue
			}
			pending++
			go func() {
				f := found{began: time.Now()}
				f.is, f.err = look()
				looks <- f
			}()
		case f := <-looks:
			pending--
			if f.err != nil {
				return f.err
			}
			switch {
			case f.is && f.began.After(not) && (is.IsZero() || f.began.Before(is)):
				is = f.began
			case !f.is && f.began.After(not) && is.IsZero():
				not = f.began
				c.lasts(not)
			}
			if !is.IsZero() && pending == 0 {
				c.ended(is.Sub(c.under.began))
				return nil
			}
		}
	}
}

// lasts notes that the change was not in effect at a time.
func (c *changes) lasts(at time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.under.took = at.Sub(c.under.began)
}

func (c *changes) ended(took time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.under.took = took
	c.made = append(c.made, c.under)
	c.under = change{}
}

// settle returns when n changes that begin from now on have ended: all that came before has been worked through by then.
func (c *changes) settle(n int) {
	c.s.Helper()
	now := time.Now()
	patience := eventually.Taking(time.Duration(n+1) * givenUp)
	patience.Nil(c.s, "the victim's changes take effect", func() error {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.err != nil {
			return c.err
		}
		if slices.ContainsFunc(c.made, func(m change) bool { return m.took > givenUp }) {
			return nil
		}
		if i := len(c.made) - n; i < 0 || c.made[i].began.Before(now) {
			return fmt.Errorf("there were %d, last %s", len(c.made), c.under.what)
		}
		return nil
	})
}

// worst is the one that took longest of those that were under way at any time since then.
func (c *changes) worst(since time.Time) (worst change) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, m := range c.made {
		if m.began.Add(m.took).After(since) && m.took > worst.took {
			worst = m
		}
	}
	if c.under.took > worst.took {
		worst = c.under
	}
	return worst
}
