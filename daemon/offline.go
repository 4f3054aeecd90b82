package daemon

import (
	"context"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/service"
)

// Compile compiles the manifests of a configuration once, without a daemon, and returns what is wrong
// with them beside the Table.
func Compile(ctx context.Context, c *config.Config, l *Logs) (*service.Table, []service.Problem, error) {
	r, err := OpenRows(c, l)
	if err != nil {
		return nil, nil, err
	}
	defer r.Close()
	batch, err := r.Next(ctx)
	if err != nil {
		return nil, nil, err
	}
	_, _, problems := r.Table.Update(batch)
	return r.Table, problems, nil
}

// Rows are the Table of a configuration, and the objects for it, without a daemon.
type Rows struct {
	Table *service.Table
	feed  *feed
}

// OpenRows begins to watch the objects.
func OpenRows(c *config.Config, l *Logs) (*Rows, error) {
	o, err := tableOptions(c)
	if err != nil {
		return nil, ConfigError{err}
	}
	table, err := service.NewTable(o)
	if err != nil {
		return nil, ConfigError{err}
	}
	settings, err := feedIn(c)
	if err != nil {
		return nil, ConfigError{err}
	}
	f, err := settings.open(l)
	if err != nil {
		return nil, ConfigError{err}
	}
	return &Rows{table, f}, nil
}

// Next waits for what changes, which is for Table.Update. The first Batch is complete.
func (r *Rows) Next(ctx context.Context) (service.Batch, error) { return r.feed.source.Next(ctx) }

// Close ends the watching.
func (r *Rows) Close() { _ = r.feed.close() }

// NewFlags are the flags of "fairlead run".
func NewFlags() *config.Flags { return config.NewFlags(Planes()...) }
