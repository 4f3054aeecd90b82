package ipvs

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"fairlead.dev/fairlead/dataplane"
)

// setting is a sysctl that the plane relies on.
type setting struct{ file, value, why string }

// settings are those of the kernels that have all the plane needs otherwise (5.13 and later).
//
// A new connection from a port that the client used a short while ago finds the old one in the memory of
// IPVS. conn_reuse_mode 1 has it scheduled anew if the old one has ended. expire_nodest_conn does the same
// if the old one's backend leaves (its weight is 0, since Linux 5.16 whatever the mode is), and makes
// connections to backends that are gone end at once. Before Linux 5.9 both cost the client a second where
// connection tracking is on (commit f0a5e4d7a594), for which reason kube-proxy sets the mode to 0 there.
func settings(o Options) []setting {
	all := []setting{
		{"/proc/sys/net/ipv4/vs/conntrack", "1", "source addresses cannot be replaced"},
		{"/proc/sys/net/ipv4/vs/conn_reuse_mode", "1", "clients that use a port again reach backends that are gone"},
		{"/proc/sys/net/ipv4/vs/expire_nodest_conn", "1", "clients keep backends that are gone"},
	}
	if o.StrictARP {
		all = append(all,
			setting{"/proc/sys/net/ipv4/conf/all/arp_ignore", "1", "the node answers ARP for Service addresses"},
			setting{"/proc/sys/net/ipv4/conf/all/arp_announce", "2", "the node announces Service addresses by ARP"})
	}
	return all
}

// sysctl is a setting with its file open in the namespace of the plane.
type sysctl struct {
	setting
	read, write *os.File
	err         error // why it cannot be set
}

func openSysctls(o Options) (all []*sysctl, err error) {
	for _, s := range settings(o) {
		c := &sysctl{setting: s}
		c.read, err = os.Open(s.file)
		if errors.Is(err, os.ErrNotExist) {
			return all, fmt.Errorf("%w: it has no %s (CONFIG_IP_VS_NFCT)", dataplane.ErrUnsupported, s.file)
		}
		if err != nil {
			return all, fmt.Errorf("settings of IPVS: %w", err)
		}
		c.write, c.err = os.OpenFile(s.file, os.O_WRONLY, 0)
		all = append(all, c)
	}
	return all, nil
}

func (c *sysctl) get() string {
	b := make([]byte, 16)
	n, _ := c.read.ReadAt(b, 0) // what cannot be read is not as it should be
	return strings.TrimSpace(string(b[:n]))
}

// set does nothing if the value is as it should be: in a container that is not privileged it can only be read.
func (c *sysctl) set() error {
	if c.get() == c.value {
		return nil
	}
	err := c.err
	if err == nil {
		_, err = c.write.WriteAt([]byte(c.value), 0)
	}
	if err != nil {
		return fmt.Errorf("%s: %w: set it to %s, or run once with --init-only in a privileged container",
			c.why, err, c.value)
	}
	return nil
}

func (c *sysctl) close() error {
	err := c.read.Close()
	if c.write != nil {
		err = errors.Join(err, c.write.Close())
	}
	return err
}
