package said

import (
	"context"
	"fmt"
	"log/slog"
)

// Bounded has a handler write lines of bounded length: it gets the message and each value as Brief and List make them.
func Bounded(to slog.Handler) slog.Handler { return bounded{to} }

type bounded struct{ slog.Handler }

func (b bounded) Handle(ctx context.Context, r slog.Record) error {
	short := slog.NewRecord(r.Time, r.Level, Brief(r.Message), r.PC)
	r.Attrs(func(a slog.Attr) bool {
		short.AddAttrs(briefAttr(a))
		return true
	})
	return b.Handler.Handle(ctx, short)
}

func (b bounded) WithAttrs(attrs []slog.Attr) slog.Handler {
	return bounded{b.Handler.WithAttrs(briefAttrs(attrs))}
}
func (b bounded) WithGroup(name string) slog.Handler { return bounded{b.Handler.WithGroup(name)} }

func briefAttrs(all []slog.Attr) []slog.Attr {
	short := make([]slog.Attr, len(all))
	for i, a := range all {
		short[i] = briefAttr(a)
	}
	return short
}

func briefAttr(a slog.Attr) slog.Attr {
	switch v := a.Value.Resolve(); v.Kind() {
	case slog.KindString:
		a.Value = slog.StringValue(Brief(v.String()))
	case slog.KindGroup:
		a.Value = slog.GroupValue(briefAttrs(v.Group())...)
	case slog.KindAny:
		a.Value = briefValue(v)
	}
	return a
}

// briefValue leaves alone what is short: the handler knows how to write it.
func briefValue(v slog.Value) slog.Value {
	if names, ok := v.Any().([]string); ok && len(names) > maxNames {
		return slog.StringValue(Brief(List(names)))
	}
	text := fmt.Sprintf("%+v", v.Any()) // which survives a nil pointer
	if short := Brief(text); short != text {
		return slog.StringValue(short)
	}
	return v
}
