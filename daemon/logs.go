package daemon

import (
	"context"
	"io"
	"log/slog"
	"slices"
	"strconv"
	"sync/atomic"

	"k8s.io/klog/v2"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/recorder"
	"fairlead.dev/fairlead/said"
)

// Logs is where the process logs: one line of bounded length for each event, as text or as JSON. Verbosity and format
// may change at any time. client-go and other Kubernetes libraries log there as well.
type Logs struct {
	level slog.LevelVar
	json  atomic.Bool
	log   *slog.Logger
	// Events has what was logged lately.
	Events recorder.Recorder
}

// NewLogs makes a Logs that writes to w.
func NewLogs(w io.Writer) *Logs {
	l := &Logs{}
	o := &slog.HandlerOptions{Level: &l.level, ReplaceAttr: plainLevel}
	l.log = slog.New(said.Bounded(l.Events.Handler(
		eitherHandler{&l.json, slog.NewTextHandler(w, o), slog.NewJSONHandler(w, o)})))
	return l
}

// Logger writes there.
func (l *Logs) Logger() *slog.Logger { return l.log }

// Set changes verbosity and format. Verbosity counts as kube-proxy's -v does: 0 is what an
// administrator wants to know, 4 is slog's level Debug.
func (l *Logs) Set(verbosity uint32, format string) {
	l.json.Store(format == "json")
	l.setLevel(verbosity)
}

func (l *Logs) setLevel(verbosity uint32) {
	l.level.Set(-slog.Level(min(verbosity, 100)))
	var klogLevel klog.Level                                     // Set sets the one of the process
	_ = klogLevel.Set(strconv.FormatUint(uint64(verbosity), 10)) // a number is never refused
}

// obey does what a configuration says of logging, and logs its warnings but those that are known.
func (l *Logs) obey(c *config.Config, known []string) {
	l.Set(uint32(c.KubeProxy.Logging.Verbosity), c.KubeProxy.Logging.Format)
	for _, w := range c.Warnings {
		if !slices.Contains(known, w) {
			l.log.Warn("configuration: " + w)
		}
	}
}

// setVerbosity takes what was sent to /debug/flags/v.
func (l *Logs) setVerbosity(text string) error {
	n, err := strconv.ParseUint(text, 10, 32)
	if err == nil {
		l.setLevel(uint32(n))
	}
	return err
}

// plainLevel calls everything below Info DEBUG: "DEBUG+2" means nothing to people.
func plainLevel(groups []string, a slog.Attr) slog.Attr {
	if a.Key != slog.LevelKey || len(groups) > 0 {
		return a
	}
	if level, ok := a.Value.Any().(slog.Level); ok && level < slog.LevelInfo {
		a.Value = slog.StringValue(slog.LevelDebug.String())
	}
	return a
}

// eitherHandler formats in one of two ways.
type eitherHandler struct {
	json         *atomic.Bool
	text, asJSON slog.Handler
}

func (h eitherHandler) Enabled(ctx context.Context, l slog.Level) bool { return h.text.Enabled(ctx, l) }

func (h eitherHandler) Handle(ctx context.Context, r slog.Record) error {
	if h.json.Load() {
		return h.asJSON.Handle(ctx, r)
	}
	return h.text.Handle(ctx, r)
}

func (h eitherHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return eitherHandler{h.json, h.text.WithAttrs(attrs), h.asJSON.WithAttrs(attrs)}
}

func (h eitherHandler) WithGroup(name string) slog.Handler {
	return eitherHandler{h.json, h.text.WithGroup(name), h.asJSON.WithGroup(name)}
}
