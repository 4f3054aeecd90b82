package kube

import (
	"context"
	"log/slog"

	"k8s.io/klog/v2"
)

// LogTo sends what client-go has to say of itself to a logger; its verbose levels are below
// slog.LevelInfo. It is for the whole process: the program calls it once, before Connect.
func LogTo(log *slog.Logger) { klog.SetSlogLogger(log) }

// background lets nothing through above slog.LevelDebug: what a Reflector says of failures, the link
// says better.
type background struct{ slog.Handler }

func (h background) Enabled(ctx context.Context, l slog.Level) bool {
	return h.Handler.Enabled(ctx, min(l, slog.LevelDebug))
}

// Handle asks once more: logr does not ask whether errors are enabled.
func (h background) Handle(ctx context.Context, r slog.Record) error {
	r.Level = min(r.Level, slog.LevelDebug)
	if !h.Handler.Enabled(ctx, r.Level) {
		return nil
	}
	return h.Handler.Handle(ctx, r)
}

func (h background) WithAttrs(attrs []slog.Attr) slog.Handler {
	return background{h.Handler.WithAttrs(attrs)}
}

func (h background) WithGroup(name string) slog.Handler { return background{h.Handler.WithGroup(name)} }
