package daemon

import (
	"context"
	"errors"
	"sync"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/model"
)

// carrying are data planes that another one has replaced, and whose connections pass through this process. They live on
// until they have none, and are taken back when they are wanted again.
type carrying struct {
	mu     sync.Mutex
	planes []former
	over   bool // the process ends
}

// former is one of them.
type former struct {
	opened
	asked bool // it has been told to take nothing new
}

// keep takes a plane that is not in force any more, unless it carries nothing by its nature or the process ends.
func (c *carrying) keep(o opened) bool {
	if !o.carries || c == nil {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.over {
		c.planes = append(c.planes, former{opened: o})
	}
	return !c.over
}

// take gives a plane back that was kept.
func (c *carrying) take(s planeSettings) (o opened, ok bool) {
	if c == nil {
		return o, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, k := range c.planes {
		if k.settings == s {
			c.planes = append(c.planes[:i:i], c.planes[i+1:]...)
			return k.opened, true
		}
	}
	return o, false
}

// look is what is to be done with planes of a name that were kept.
type look struct {
	name  string
	over  bool // they have had their time
	alike bool // one like them, with other settings, is in force: what is in the kernel is its
}

// drain has planes take nothing new, and closes those that carry nothing any more. It returns how many connections the
// others have.
func (c *carrying) drain(ctx context.Context, s *model.State, l look) (connections int, err error) {
	if c == nil {
		return 0, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var left []former
	var errs []error
	for _, o := range c.planes {
		n, err := l.drain(ctx, s, o.opened)
		errs = append(errs, err)
		if o.settings.name == l.name && !l.over && !o.asked { // somebody may be on the way still
			o.asked = true
			n = max(1, n)
		}
		if connections += n; n > 0 || o.settings.name != l.name {
			left = append(left, o)
		} else {
			errs = append(errs, o.Close())
		}
	}
	c.planes = left
	return connections, errors.Join(errs...)
}

// drain is how many connections one of them has.
func (l look) drain(ctx context.Context, s *model.State, o opened) (connections int, err error) {
	switch {
	case l.over || o.settings.name != l.name:
		return 0, nil
	case l.alike:
		return o.inner.Open(), nil
	}
	connections, err = o.inner.SetStage(ctx, s, dataplane.Draining)
	if err != nil {
		connections = max(1, connections)
	}
	return connections, err
}

// tell says what is carried still. While planes are drained nobody waits for the answer.
func (c *carrying) tell() (all []engine.Carrying) {
	if !c.mu.TryLock() {
		return nil
	}
	defer c.mu.Unlock()
	for _, o := range c.planes {
		all = append(all, engine.Carrying{Plane: o.settings.name, Connections: o.inner.Open()})
	}
	return all
}

// close ends all connections.
func (c *carrying) close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.over = true
	var errs []error
	for _, o := range c.planes {
		errs = append(errs, o.Close())
	}
	c.planes = nil
	return errors.Join(errs...)
}
