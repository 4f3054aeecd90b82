package config_test

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/spf13/pflag"
	"golang.org/x/tools/txtar"

	"fairlead.dev/fairlead/config"
)

var update = flag.Bool("update", false, "write what is found into the cases")

// A trial is a case of testdata/load: flags and files, and what must come of them. Its files are
//
//	flags          one argument a line
//	config.conf    KubeProxyConfiguration, given by --config=DIR/config.conf
//	fairlead.conf  FairleadConfiguration, beside it
//	planes         the data planes that are built in; without it nftables
//	want           changed settings, warnings and errors
//	kube-proxy     why the real kube-proxy does something else; without that it must do the same
type trial struct {
	path    string
	archive *txtar.Archive
	dir     string
}

func trials(t *testing.T) []*trial {
	t.Helper()
	paths, err := filepath.Glob("testdata/load/*.txtar")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no cases: %v", err)
	}
	var all []*trial
	for _, path := range paths {
		archive, err := txtar.ParseFile(path)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, &trial{path: path, archive: archive})
	}
	return all
}

func (c *trial) name() string { return strings.TrimSuffix(filepath.Base(c.path), ".txtar") }

func (c *trial) file(name string) (string, bool) {
	i := slices.IndexFunc(c.archive.Files, func(f txtar.File) bool { return f.Name == name })
	if i < 0 {
		return "", false
	}
	return string(c.archive.Files[i].Data), true
}

// planes are the data planes that are built in.
func (c *trial) planes() []string {
	if text, ok := c.file("planes"); ok {
		return strings.Fields(text)
	}
	return []string{"nftables"}
}

// arguments writes the files and returns the command line.
func (c *trial) arguments(t *testing.T) []string {
	c.dir = t.TempDir()
	for _, name := range []string{"config.conf", "fairlead.conf"} {
		if text, ok := c.file(name); ok {
			write(t, filepath.Join(c.dir, name), text)
		}
	}
	text, _ := c.file("flags")
	return strings.FieldsFunc(strings.ReplaceAll(text, "DIR", c.dir), func(r rune) bool { return r == '\n' })
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// load is what Load makes of arguments: errors of the flags themselves are Load's for a user.
func load(arguments []string) (*config.Flags, *config.Config, error) {
	return loadFor(arguments, "nftables")
}

func loadFor(arguments []string, planes ...string) (*config.Flags, *config.Config, error) {
	flags := config.NewFlags(planes...)
	set := pflag.NewFlagSet("test", pflag.ContinueOnError)
	set.SetOutput(new(bytes.Buffer))
	flags.AddTo(set)
	if err := set.Parse(arguments); err != nil {
		return flags, nil, err
	}
	c, err := flags.Load()
	return flags, c, err
}

// outcome is what has come of it as text: the settings that differ from the default ones, the
// warnings, the errors.
func (c *trial) outcome(t *testing.T, loaded *config.Config, err error) string {
	var out strings.Builder
	if err == nil {
		_, plain, plainErr := load(nil)
		if plainErr != nil {
			t.Fatal(plainErr)
		}
		for _, change := range config.Compare(plain, loaded) {
			new := change.New
			if new == "" {
				new = "nothing"
			}
			out.WriteString(change.Field + ": " + new + "\n")
		}
		for _, line := range loaded.Warnings {
			out.WriteString("warning: " + line + "\n")
		}
	} else {
		for line := range strings.Lines(err.Error()) {
			out.WriteString("error: " + strings.TrimSpace(line) + "\n")
		}
	}
	return strings.NewReplacer(c.dir+string(filepath.Separator), "DIR/", c.dir, "DIR",
		syscall.ENOENT.Error(), "no such file or directory").Replace(out.String())
}

// TestLoad holds every case against what Load says.
func TestLoad(t *testing.T) {
	for _, c := range trials(t) {
		t.Run(c.name(), func(t *testing.T) {
			_, loaded, err := loadFor(c.arguments(t), c.planes()...)
			got := c.outcome(t, loaded, err)
			want, _ := c.file("want")
			if got == want {
				return
			}
			if !*update {
				t.Errorf("%s\n--- got\n%s--- want\n%s", c.archive.Comment, got, want)
				return
			}
			c.set("want", got)
			write(t, c.path, string(txtar.Format(c.archive)))
		})
	}
}

func (c *trial) set(name, text string) {
	i := slices.IndexFunc(c.archive.Files, func(f txtar.File) bool { return f.Name == name })
	if i < 0 {
		i = len(c.archive.Files)
		c.archive.Files = append(c.archive.Files, txtar.File{Name: name})
	}
	c.archive.Files[i].Data = []byte(text)
}
