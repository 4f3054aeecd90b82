package engine

import (
	"maps"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/model"
)

// maxEdits is how many changes of a namespace the log has in a minute, if there are few of others.
const maxEdits = 60

// LastChange is the last one of a Service's rows since this process has programmed all of them.
type LastChange struct {
	Changed time.Time     `json:"lastChange,omitzero"`
	Took    time.Duration `json:"lastChangeNanoseconds,omitempty"`
}

// edit is how many rows of a Service a change sets and deletes.
type edit struct{ set, deleted int }

// logEdits writes a line for each Service of a change that is in force. Backends that leave a pool show in the pool,
// which is set.
func (e *Engine) logEdits(c *model.Change, took time.Duration) {
	edits := map[string]*edit{}
	of := func(port string) *edit { // of the Service
		name, _, _ := strings.Cut(port, ":")
		if edits[name] == nil {
			edits[name] = &edit{}
		}
		return edits[name]
	}
	for _, f := range c.Frontends.Set.All() {
		of(f.Service).set++
	}
	for id := range c.Pools.Set.Keys() {
		of(id.Service).set++
	}
	for _, id := range c.Pools.Delete {
		of(id.Service).deleted++
	}
	now := time.Now()
	for _, name := range slices.Sorted(maps.Keys(edits)) {
		if edits[name].set > 0 {
			e.lastChanges[name] = LastChange{now, took}
		} else {
			delete(e.lastChanges, name)
		}
		namespace, _, _ := strings.Cut(name, "/")
		if e.edited.May(namespace, now) {
			e.options.Log.Info("a change is in force", "service", name, "set", edits[name].set, "deleted", edits[name].deleted,
				"took", took)
		}
	}
	if more, of := e.edited.Withheld(); more > 0 {
		e.options.Log.Info("more changes are in force", "count", more, "total", of)
	}
}
