package daemon

import (
	"context"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/service"
)

// Compile compiles the manifests of a configuration once, without a daemon, and returns what is wrong
// with them beside the Table.
func Compile(ctx context.Context, c *config.Config, l *Logs) (*service.Table, []service.Problem, error) {
	o, err := tableOptions(c)
	if err != nil {
		return nil, nil, ConfigError{err}
	}
	table, err := service.NewTable(o)
	if err != nil {
		return nil, nil, ConfigError{err}
	}
	settings, err := feedIn(c, "")
	if err != nil {
		return nil, nil, ConfigError{err}
	}
	f, err := settings.open(l)
	if err != nil {
		return nil, nil, ConfigError{err}
	}
	defer f.close()
	batch, err := f.source.Next(ctx)
	if err != nil {
		return nil, nil, err
	}
	_, _, problems := table.Update(batch)
	return table, problems, nil
}

// NewFlags are the flags of "fairlead run".
func NewFlags() *config.Flags { return config.NewFlags(Planes()...) }
