package config

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/pflag"
)

// PrintHelp writes what every flag is for, in groups, as wide as a terminal of so many columns; 0:
// lines are not wrapped.
func (f *Flags) PrintHelp(w io.Writer, columns int) error {
	for _, name := range f.sets.Order {
		shown := pflag.NewFlagSet(name, pflag.ContinueOnError)
		shown.SortFlags = false
		shown.AddFlagSet(f.sets.FlagSets[name])
		title := strings.ToUpper(name[:1]) + name[1:]
		if _, err := fmt.Fprintf(w, "\n%s:\n%s", title, shown.FlagUsagesWrapped(columns)); err != nil {
			return err
		}
	}
	return nil
}
