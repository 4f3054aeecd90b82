package nftables

import (
	"errors"
	"fmt"
	"net/netip"
	"os"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// localnet is the sysctl without which the kernel does not route what comes back from a backend to
// a process of this node that asked 127.0.0.1. It is set when a frontend on such an address appears.
// Packets that come from outside to 127.0.0.0/8 are then dropped by a rule of ours; so that the
// sysctl does not stay behind without that rule, a chain records that it was we who set it.
type localnet struct {
	file *os.File // nil: there is none
	err  error    // why it cannot be set; nil: it can
}

const (
	localnetFile  = "/proc/sys/net/ipv4/conf/all/route_localnet"
	chainLocalnet = "route-localnet-was-off"
)

// openLocalnet opens the sysctl of the calling thread's network namespace. In a container that is not
// privileged it can be read only, see Prepare.
func openLocalnet() localnet {
	f, err := os.OpenFile(localnetFile, os.O_RDWR, 0)
	if err != nil {
		f, _ = os.Open(localnetFile) // what is missing is told by err
	}
	return localnet{f, err}
}

// Prepare sets the sysctl in favour of a later process that may not, in a pod with CAP_NET_ADMIN alone.
// The rule that belongs to it, and the record that it was off, are there before.
func Prepare(c dataplane.Config) (err error) {
	opened, err := New(c)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, opened.Close()) }()
	p := opened.(*Plane)
	if p.localnet.on() {
		return nil
	}
	tx := &transaction{}
	t := p.newTables(tx)[0]
	if err := p.load(t); err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	if !t.exists {
		if err := t.structure(); err != nil {
			return err
		}
	}
	if err := t.setChain(chain{name: chainLocalnet}); err != nil {
		return err
	}
	if err := p.commit(tx); err != nil {
		return err
	}
	return p.localnet.set("1")
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

// needLocalnet records, in the transaction, that the sysctl is about to be set, or that another plane has set it.
func (t *table) needLocalnet(frontends map[model.Key]model.Frontend) error {
	if t.v6() || t.localnet {
		return nil
	}
	for key, f := range frontends {
		if f.Verdict == model.Forward && isLocalnet(key.Addr) {
			t.localnet = true
			break
		}
	}
	needed := t.localnet && !t.localnetIsOn || t.localnetWasOff
	if _, recorded := t.chains[chainLocalnet]; recorded || !needed {
		return nil
	}
	return t.setChain(chain{name: chainLocalnet})
}

func isLocalnet(a netip.Addr) bool { return a.Is4() && a.IsLoopback() }

// settleLocalnet sets the sysctl if it is needed, and puts it back if it no longer is and we set it.
func (p *Plane) settleLocalnet(tables []*table) error {
	for _, t := range tables {
		if t.localnet && !p.localnet.on() {
			return p.localnet.set("1")
		}
	}
	return nil
}

// removeLocalnet puts the sysctl back before the table goes that says that we set it.
func (p *Plane) removeLocalnet(t *table) error {
	err := t.loadChains(p.conn)
	if _, recorded := t.chains[chainLocalnet]; recorded && !p.config.KeepLocalnet {
		err = errors.Join(err, p.localnet.set("0"))
	}
	return err
}
