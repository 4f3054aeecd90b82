package engine

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	"fairlead.dev/fairlead/httpserve"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/said"
)

// responderTick is how soon the responder sees a new file.
const responderTick = 50 * time.Millisecond

// Respond answers at the health check ports of Services what an agent writes into a file, until ctx ends. Without a
// file it has no sockets. Several responders can listen at a time, so that a new one begins before the old one ends.
func Respond(ctx context.Context, path string, log *slog.Logger) error {
	r := &responder{path: path, log: log}
	c := newChecks(r.health, httpserve.New(httpserve.Health(), nil))
	c.bind = listenShared
	defer c.close()
	rows := model.NewState()
	tick := time.NewTicker(responderTick)
	defer tick.Stop()
	for {
		if s, ok := r.read(); ok {
			rows = s
		}
		c.follow(rows, log)
		select {
		case <-tick.C:
		case <-ctx.Done():
			time.Sleep(answerTime) // for clients whose handshake has begun
			for at := range c.servers {
				c.end(at)
			}
			return nil
		}
	}
}

type responder struct {
	path    string
	log     *slog.Logger
	record  atomic.Pointer[healthRecord] // nil: there is no file
	failure said.Condition
}

// health is that of the agent. It may be called from any goroutine.
func (r *responder) health() (Status, bool) {
	record := r.record.Load()
	return Status{}, record != nil && record.Healthy && time.Since(record.written) <= record.MaxAge
}

// read reads the file if it is a new one. One that cannot be read leaves all as it is.
func (r *responder) read() (rows *model.State, ok bool) {
	info, err := os.Stat(r.path)
	if errors.Is(err, fs.ErrNotExist) {
		r.record.Store(nil)
		return model.NewState(), true
	}
	known := r.record.Load()
	if err == nil && known != nil && known.written.Equal(info.ModTime()) && os.SameFile(known.file, info) {
		return nil, false
	}
	var text []byte
	record := &healthRecord{}
	if err == nil {
		record.file, record.written = info, info.ModTime()
		text, err = os.ReadFile(r.path)
	}
	if err == nil {
		err = json.Unmarshal(text, record)
	}
	if err == nil {
		rows, err = model.ParseState(record.Rows)
	}
	if err != nil {
		if r.failure.Changed(err.Error()) {
			r.log.Error("cannot read what to answer to health checks; trying again", "path", r.path, "error", err)
		}
		return nil, false
	}
	r.failure.Cleared()
	r.record.Store(record)
	return rows, true
}
