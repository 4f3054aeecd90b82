package daemon

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/netip"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/handover"
	"fairlead.dev/fairlead/model"
)

// node is what there is on a node beside the data plane: nothing on Windows. HNS has no settings of a machine, tells
// nothing of changes, and has one plane.
type node struct{}

func (*Daemon) openNode() error                                 { return nil }
func (*Daemon) prepareNode(*config.Config)                      {}
func (*Daemon) changeNode(_, _ *config.Config)                  {}
func (*Daemon) rulesInForce(context.Context)                    {}
func (*Daemon) takeOver(context.Context)                        {}
func (*Daemon) takeOverOnce(context.Context) error              { return nil }
func (*node) close() error                                      { return nil }
func (*node) changes() <-chan dataplane.ExternalChange          { return nil }
func (*node) bulk() (end func())                                { return func() {} }
func (*node) planeBegins()                                      {}
func (*node) planeCleared(*handover.Plane)                      {}
func (*Daemon) whyServes(string) string                         { return "" }
func (*Daemon) atStart(c *config.Config) (planeSettings, error) { return planeIn(c), nil }
func (*Daemon) wanted(c *config.Config) planeSettings           { return planeIn(c) }
func (d *Daemon) requested() planeSettings                      { return d.planeSettings }

func (*node) connector() func(context.Context, netip.AddrPort) bool { return nil }

func (*Daemon) chooser() func(context.Context, *model.State) (*handover.Plane, error) { return nil }

// Clean removes all that the data plane, in this or an earlier process, has made, and says so.
func Clean(ctx context.Context, out io.Writer, _ *slog.Logger) error { return CleanOwn(ctx, out) }

// CleanOwn does the same: HNS does not tell what kube-proxy has made.
func CleanOwn(ctx context.Context, out io.Writer) error { return cleanOwn(ctx, out, false, false) }

// Init does what needs more rights than a process has later, which is nothing on Windows.
func Init(o Options) error {
	_, err := load(o)
	return errors.Join(err, errors.New("--init-only needs Linux: Windows knows no rights that suffice after it"))
}
