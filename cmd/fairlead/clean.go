package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/dataplane"
)

func cleanCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "clean",
		Short: "delete all that any data plane of this or an earlier process has made in the kernel",
		Args:  cobra.NoArgs,
		RunE:  func(c *cobra.Command, _ []string) error { return failed(clean(c.Context())) },
	}
}

func clean(ctx context.Context) error {
	var errs []error
	for _, mode := range slices.Sorted(maps.Keys(planes())) {
		p, err := planes()[mode].open(dataplane.Config{})
		switch {
		case errors.Is(err, dataplane.ErrUnsupported):
			continue // then it has made nothing
		case err == nil:
			err = errors.Join(p.Remove(ctx), p.Close())
		}
		if err == nil {
			fmt.Println(mode + ": removed")
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
