package daemon

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"

	"golang.org/x/sys/windows"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/handover"
	"fairlead.dev/fairlead/dataplane/kernelspace"
)

// planeSettings tell one data plane from another. They are compared.
type planeSettings struct {
	name, network, rootEndpoint string
	sourceVIP, nodeIP           netip.Addr
	everywhere                  bool // NodePorts are open on all addresses
}

// planeOf is the data plane with what the configuration says of it.
func planeOf(c *config.Config, name string) planeSettings {
	w := &c.KubeProxy.Winkernel
	s := planeSettings{
		name: name, network: cmp.Or(w.NetworkName, os.Getenv("KUBE_NETWORK")),
		rootEndpoint: cmp.Or(w.RootHnsEndpointName, "cbr0"), sourceVIP: c.SourceVIP(),
		everywhere: slices.Contains(c.NodePortAddresses(), "all"),
	}
	if i := slices.IndexFunc(c.NodeIPs(), netip.Addr.Is4); i >= 0 { // overlay networks have IPv4 only
		s.nodeIP = c.NodeIPs()[i]
	}
	return s
}

func (s planeSettings) driver() dataplane.Driver {
	return kernelspace.Driver(kernelspace.Options{
		Network: s.network, SourceVIP: s.sourceVIP, RootEndpoint: s.rootEndpoint, NodeIP: s.nodeIP,
		Everywhere: s.everywhere, Records: config.DataDirectory(),
	})
}

// drivers are those of all planes. Their settings are of no interest.
func drivers() []dataplane.Driver { return []dataplane.Driver{planeSettings{}.driver()} }

func (planeSettings) variant() string              { return "" }
func (planeSettings) movesFrom(planeSettings) bool { return false }

// open opens the plane; there is none to serve instead.
func (s planeSettings) open(c dataplane.Config) (*handover.Plane, error) {
	p, err := s.openItself(c)
	return p, permitted(err)
}

func (s planeSettings) openItself(c dataplane.Config) (*handover.Plane, error) {
	p, err := s.driver().Open(c)
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
