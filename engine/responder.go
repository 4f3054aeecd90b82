package engine

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"fairlead.dev/fairlead/httpserve"
	"fairlead.dev/fairlead/said"
)

// responderTick is how soon the responder sees a new file.
const responderTick = 50 * time.Millisecond

// Respond answers at the health check ports of Services what an agent writes into a file, until ctx ends. Without a
// file it has no sockets. Several responders can listen at a time, so that a new one begins before the old one ends.
func Respond(ctx context.Context, path string, log *slog.Logger) {
	r := &responder{path: path, log: log}
	r.record.Store(&healthRecord{})
	c := newChecks(r.health, httpserve.New(httpserve.Health(), nil))
	c.bind = listenShared
	defer c.close()
	wait.UntilWithContext(ctx, func(context.Context) {
		r.read()
		c.follow(r.record.Load().Rows, log)
	}, responderTick)
	time.Sleep(answerTime) // for clients whose handshake has begun
	for at := range c.servers {
		c.end(at)
	}
}

type responder struct {
	path    string
	log     *slog.Logger
	text    []byte                       // of the file
	record  atomic.Pointer[healthRecord] // without rows: there is no file
	failure said.Condition
}

// health is that of the agent. It may be called from any goroutine.
func (r *responder) health() (Status, bool) {
	record := r.record.Load()
	return Status{}, record.Healthy && time.Since(record.Written) <= record.MaxAge
}

// read reads the file. One that cannot be read leaves all as it is.
func (r *responder) read() {
	text, err := os.ReadFile(r.path)
	record := &healthRecord{}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		text, err = nil, nil
	case err == nil && bytes.Equal(text, r.text):
		return
	case err == nil:
		err = json.Unmarshal(text, record)
	}
	if err != nil {
		if r.failure.Changed(err.Error()) {
			r.log.Error("cannot read what to answer to health checks; trying again", "path", r.path, "error", err)
		}
		return
	}
	r.failure.Cleared()
	r.text = text
	r.record.Store(record)
}
