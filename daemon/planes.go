package daemon

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/localhost"
	"fairlead.dev/fairlead/dataplane/nftables"
)

// plane is a data plane by its name.
type plane struct {
	name string
	new  dataplane.New
	// prepare does what NodePorts on 127.0.0.1 need and a process with CAP_NET_ADMIN alone may not do.
	prepare func(dataplane.Config) error
}

// planes come in the order in which they are chosen for a mode that has none of its own.
func planes() []plane {
	return []plane{
		{"nftables", localhost.Wrap(conntrack.Wrap(nftables.New)), nftables.Prepare},
	}
}

// Planes are the names of the data planes that are built in.
func Planes() (names []string) {
	for _, p := range planes() {
		names = append(names, p.name)
	}
	return names
}

// openPlane opens a data plane by its name.
func openPlane(name string, c dataplane.Config) (dataplane.Dataplane, error) {
	i := slices.Index(Planes(), name)
	if i < 0 {
		return nil, fmt.Errorf("there is no data plane %q", name)
	}
	return planes()[i].open(c)
}

// open makes the plane; of its errors the most frequent one says what to do.
func (p plane) open(c dataplane.Config) (dataplane.Dataplane, error) {
	opened, err := p.new(c)
	if errors.Is(err, unix.EPERM) {
		err = fmt.Errorf("root, or CAP_NET_ADMIN, is needed to program the kernel: %w", err)
	}
	return opened, err
}
