package main

import (
	"context"
	"io"
	"os"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/daemon"
)

// serve runs the daemon.
func serve(ctx context.Context, _ *config.Flags, o daemon.Options) error { return daemon.Run(ctx, o) }

// standardLog is where the log goes that no file takes.
func standardLog(*config.Flags) (io.Writer, error) { return os.Stderr, nil }
