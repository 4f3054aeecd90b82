package iptables

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// localnet is the sysctl without which the kernel does not route what comes back from a backend to a
// process of this node that asked 127.0.0.1. It is set when a frontend on such an address appears, once the
// rule is there that drops packets from elsewhere to these addresses. A chain records that we have set it.
type localnet struct {
	file *os.File // nil: there is none
	err  error    // why it cannot be set; nil: it can
}

const localnetFile = "/proc/sys/net/ipv4/conf/all/route_localnet"

// openLocalnet opens the sysctl of the calling thread's network namespace. In a container that is not
// privileged it can be read only.
func openLocalnet() localnet {
	f, err := os.OpenFile(localnetFile, os.O_RDWR, 0)
	if err != nil {
		f, _ = os.Open(localnetFile) // what is missing is told by err
	}
	return localnet{f, err}
}

// Prepare sets the sysctl in favour of a later process that may not, in a pod with CAP_NET_ADMIN alone. The rules
// that belong to it, and the record that it was off, are there before.
func Prepare(o Options) func(dataplane.Config) error {
	return func(c dataplane.Config) (err error) {
		opened, err := New(o)(c)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, opened.Close()) }()
		p := opened.(*Plane)
		if p.localnet.on() {
			return nil
		}
		if err := p.prepareLocalnet(); err != nil {
			return fmt.Errorf("iptables: %w", err)
		}
		return p.localnet.set("1")
	}
}

// prepareLocalnet leaves what another process has programmed as it is.
func (p *Plane) prepareLocalnet() error {
	ctx, id := context.Background(), tableID{name: tableNames[nat]}
	have, err := p.backend.load(id)
	if err != nil {
		return err
	}
	record := &change{table: id, set: map[string][]rule{chainLocalnet: nil}, known: map[string]bool{}}
	if err := p.write(ctx, []*change{record}); err != nil {
		return err
	}
	if _, programmed := have.chains[chainIn]; programmed {
		return nil
	}
	return p.Sync(ctx, model.NewState())
}

func (l localnet) on() bool {
	var b [1]byte
	if l.file != nil {
		_, _ = l.file.ReadAt(b[:], 0) // what cannot be read is taken to be off
	}
	return b[0] == '1'
}

func (l localnet) set(value string) error {
	if l.err != nil {
		return fmt.Errorf("NodePorts on 127.0.0.1: %w: set it to 1, or run once with --init-only in a privileged container",
			l.err)
	}
	if _, err := l.file.WriteAt([]byte(value), 0); err != nil {
		return fmt.Errorf("NodePorts on 127.0.0.1: %w", err)
	}
	return nil
}

func (l localnet) close() error {
	if l.file == nil {
		return nil
	}
	return l.file.Close()
}

func isLocalnet(a netip.Addr) bool { return a.Is4() && a.IsLoopback() }
