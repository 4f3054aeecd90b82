package kernelspace

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// record says which objects of HNS are Fairlead's: they have no labels, and other programs have their own there. It is
// a file of one line for each event, so that a process that is killed between two calls leaves nothing that the next
// one does not know:
//
//	{"object":"load balancer 10.96.0.10:80/tcp"}              is about to be made
//	{"object":"load balancer 10.96.0.10:80/tcp","id":"6F…"}   was made
//	{"object":"load balancer 10.96.0.10:80/tcp","gone":true}  was deleted
//
// HNS forgets its objects when Windows restarts, so the file need not outlive that: it is never synced to disk.
type record struct {
	path    string // empty: nothing is written
	file    *os.File
	lines   int               // of the file
	objects map[string]string // their ids; empty: it was about to be made
}

type event struct {
	Object string `json:"object"`
	ID     string `json:"id,omitempty"`
	Gone   bool   `json:"gone,omitempty"`
}

// recordName is the file's name in the directory of Options.
const recordName = "hns-objects.jsonl"

// openRecord reads what an earlier process has written. A line that was cut short is the last one, of an event after
// which nothing was done.
func openRecord(dir string) (*record, error) {
	r := &record{objects: map[string]string{}}
	if dir == "" {
		return r, nil
	}
	r.path = filepath.Join(dir, recordName)
	f, err := os.Open(r.path)
	if errors.Is(err, fs.ErrNotExist) {
		return r, nil
	}
	if err != nil {
		return nil, fmt.Errorf("record of Fairlead's objects in HNS: %w", err)
	}
	defer f.Close()
	lines := bufio.NewReader(f)
	for {
		line, err := lines.ReadBytes('\n')
		var e event
		if err == nil && json.Unmarshal(line, &e) == nil {
			r.take(e)
		}
		if errors.Is(err, io.EOF) {
			return r, nil
		}
		if err != nil {
			return nil, fmt.Errorf("record of Fairlead's objects in HNS: %w", err)
		}
	}
}

func (r *record) take(e event) {
	if e.Gone {
		delete(r.objects, e.Object)
		return
	}
	r.objects[e.Object] = e.ID
}

// write adds an event. If it fails, nothing may be done to the object.
func (r *record) write(e event) error {
	if id, ok := r.objects[e.Object]; ok == !e.Gone && id == e.ID {
		return nil
	}
	if r.path != "" {
		if err := r.open(); err != nil {
			return err
		}
		line, err := json.Marshal(e)
		if err != nil {
			return err
		}
		if _, err := r.file.Write(append(line, '\n')); err != nil {
			// Half a line may be there. The next event begins the file anew.
			return errors.Join(fmt.Errorf("record of Fairlead's objects in HNS: %w", err), r.close())
		}
		r.lines++
	}
	r.take(e)
	return nil
}

// open begins the file anew, with one line for each object, if most of its lines do not count any more.
func (r *record) open() error {
	if r.file != nil && r.lines < 10_000+4*len(r.objects) {
		return nil
	}
	if err := errors.Join(r.close(), r.begin()); err != nil {
		return fmt.Errorf("record of Fairlead's objects in HNS: %w", err)
	}
	return nil
}

func (r *record) begin() (err error) {
	if err := os.MkdirAll(filepath.Dir(r.path), 0o700); err != nil {
		return err
	}
	next := r.path + ".new"
	f, err := os.OpenFile(next, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	out := bufio.NewWriter(f)
	lines := json.NewEncoder(out)
	for _, object := range slices.Sorted(maps.Keys(r.objects)) {
		if err := lines.Encode(event{Object: object, ID: r.objects[object]}); err != nil {
			return errors.Join(err, f.Close())
		}
	}
	// Windows renames no file that is open.
	if err := errors.Join(out.Flush(), f.Close(), os.Rename(next, r.path)); err != nil {
		return err
	}
	r.lines = len(r.objects)
	r.file, err = os.OpenFile(r.path, os.O_WRONLY|os.O_APPEND, 0o600)
	return err
}

// owns reports whether an object that HNS has is Fairlead's.
func (r *record) owns(object, id string) bool {
	own, ok := r.objects[object]
	return ok && (own == "" || own == id)
}

// networks are the ids of those that have endpoints of Fairlead's, after an empty one for load balancers, which have
// none.
func (r *record) networks() []string {
	ids := map[string]bool{"": true}
	for object := range r.objects {
		if _, id, ok := strings.Cut(object, ofNetwork); ok {
			ids[id] = true
		}
	}
	return slices.Sorted(maps.Keys(ids))
}

func (r *record) close() error {
	if r.file == nil {
		return nil
	}
	err := r.file.Close()
	r.file = nil
	return err
}

// remove deletes the file when there are no objects any more.
func (r *record) remove() error {
	if r.path == "" || len(r.objects) > 0 {
		return r.close()
	}
	err := errors.Join(r.close(), os.Remove(r.path))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
