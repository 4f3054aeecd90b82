package engine

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"fairlead.dev/fairlead/httpserve"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/said"
)

// responderTick is how soon the responder sees a new file.
const responderTick = 50 * time.Millisecond

// Respond answers at the health check ports of Services what an agent writes into a file, until ctx ends. Without a
// file it has no sockets. Several responders can listen at a time, so that a new one begins before the old one ends.
func Respond(ctx context.Context, path string, log *slog.Logger) {
	r := &responder{path: path, log: log}
	r.answers.Store(&answers{})
	c := newChecks(r.health, httpserve.New(httpserve.Health(), nil))
	c.bind = listenShared
	defer c.close()
	wait.UntilWithContext(ctx, func(context.Context) {
		r.read()
		c.follow(r.answers.Load().rows, log)
	}, responderTick)
	time.Sleep(answerTime) // for clients whose handshake has begun
	for at := range c.servers {
		c.end(at)
	}
}

type responder struct {
	path    string
	log     *slog.Logger
	file    fs.FileInfo             // that was read last; nil: there is none
	answers atomic.Pointer[answers] // those of the last file that could be parsed, or none
	failure said.Condition
}

// answers are what a file says.
type answers struct {
	healthRecord
	rows    map[netip.AddrPort]model.Health // parsed
	written time.Time
}

// health is that of the agent. It may be called from any goroutine.
func (r *responder) health() (Status, bool) {
	a := r.answers.Load()
	return Status{}, a.Healthy && time.Since(a.written) <= a.MaxAge
}

// read reads the file if it is another one. One that cannot be read leaves all as it is.
func (r *responder) read() {
	file, err := os.Stat(r.path)
	if known := r.file; err == nil && known != nil && os.SameFile(file, known) && file.Size() == known.Size() &&
		file.ModTime().Equal(known.ModTime()) {
		return
	}
	var text []byte
	if err == nil {
		text, err = os.ReadFile(r.path)
	}
	a := &answers{}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		r.file, err = nil, nil
	case err == nil:
		r.file = file
		err = a.parse(text, file)
	}
	if r.failure.Failed(err) {
		r.log.Error("cannot read what to answer to health checks; trying again", "path", r.path, "error", err)
	}
	if err == nil {
		r.answers.Store(a)
	}
}

func (a *answers) parse(text []byte, file fs.FileInfo) error {
	if err := json.Unmarshal(text, &a.healthRecord); err != nil {
		return err
	}
	s, err := model.ParseState(a.Rows)
	if err == nil {
		now := time.Now() // whose monotonic clock counts from now on; the other one may have been set meanwhile
		a.rows, a.written = s.Health, now.Add(-max(0, now.Sub(file.ModTime())))
	}
	return err
}
