package daemon

import (
	"cmp"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/windows"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/handover"
	"fairlead.dev/fairlead/dataplane/kernelspace"
)

// planeSettings tell one data plane from another. They are compared.
type planeSettings struct {
	name        string
	kernelspace kernelspace.Options
}

// planeOf is the data plane with what the configuration says of it.
func planeOf(c *config.Config, name string) planeSettings {
	w := &c.KubeProxy.Winkernel
	s := planeSettings{name: name, kernelspace: kernelspace.Options{
		Network: cmp.Or(w.NetworkName, os.Getenv("KUBE_NETWORK")), SourceVIP: w.SourceVip, DSR: w.EnableDSR,
		Records: config.DataDirectory(),
	}}
	if w.ForwardHealthCheckVip {
		s.kernelspace.RootEndpoint = cmp.Or(w.RootHnsEndpointName, "cbr0")
	}
	return s
}

// drivers are those of all planes.
func drivers() []dataplane.Driver {
	return []dataplane.Driver{kernelspace.Driver(kernelspace.Options{Records: config.DataDirectory()})}
}

func (planeSettings) variant() string              { return "" }
func (planeSettings) movesFrom(planeSettings) bool { return false }

// open opens the plane; there is none to serve instead.
func (s planeSettings) open(c dataplane.Config) (p *handover.Plane, instead string, err error) {
	p, err = s.openItself(c)
	return p, "", permitted(err)
}

func (s planeSettings) openItself(c dataplane.Config) (*handover.Plane, error) {
	p, err := kernelspace.Driver(s.kernelspace).Open(c)
	if err != nil {
		return nil, err
	}
	return &handover.Plane{Dataplane: p, Name: s.name, Settings: s}, nil
}

// permitted says of the most frequent error what to do.
func permitted(err error) error {
	if errors.Is(err, windows.ERROR_ACCESS_DENIED) {
		return fmt.Errorf("an administrator, or the account SYSTEM, is needed to program the kernel: %w", err)
	}
	return err
}
