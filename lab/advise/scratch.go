package advise

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/traffic"
)

// The pods of a scratch cluster.
const (
	client = "client"
	server = "server"
)

// scratch is a virtual cluster whose node has a data plane, or none.
type scratch struct {
	bed   *testbed.Bed
	bpf   *os.File // may be nil
	plane dataplane.Dataplane
	loop  *traffic.Loop // from the client to the server
}

// errScratch is wrapped by errors for which no scratch cluster can be made at all.
var errScratch = errors.New("there can be no network namespaces to measure in")

// newScratch makes a cluster with an address of the server in each family.
func newScratch(ctx context.Context) (*scratch, error) {
	spec := testbed.Spec{
		Pods: []testbed.PodSpec{
			{Name: server, Addrs: []netip.Addr{serverAddr(false), serverAddr(true)}}, {Name: client},
		},
		Cgroup: true,
	}
	bed, err := testbed.New(ctx, spec)
	if noCgroup(err) { // then only the plane that needs it is not measured
		spec.Cgroup = false
		bed, err = testbed.New(ctx, spec)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errScratch, err)
	}
	s := &scratch{bed: bed}
	if s.loop, err = traffic.NewLoop(bed, client, server, traffic.Ports(firstPort, serverPorts+1)); err != nil {
		return nil, errors.Join(err, bed.Close())
	}
	return s, nil
}

// noCgroup reports whether only cgroups are missing. Unprivileged containers see theirs in a file system that is
// read-only.
func noCgroup(err error) bool {
	return errors.Is(err, os.ErrPermission) || errors.Is(err, errors.ErrUnsupported) || errors.Is(err, unix.EROFS)
}

// open puts a data plane on the node.
func (s *scratch) open(p Plane) error {
	place := Place{Cgroup: s.bed.Cgroup()}
	var err error
	if s.bpf, place.BPF, err = testbed.BPFFS(); err != nil {
		place.BPF = "" // the plane that needs it says so
	}
	return s.bed.Do(testbed.Node, func() (err error) {
		s.plane, err = p.Open(place)
		return err
	})
}

// close removes all of it.
func (s *scratch) close() error {
	var errs []error
	if s.plane != nil {
		errs = append(errs, s.plane.Close())
	}
	s.loop.Close()
	errs = append(errs, s.bed.Close())
	if s.bpf != nil {
		errs = append(errs, s.bpf.Close()) // and with it all that is pinned there
	}
	return errors.Join(errs...)
}
