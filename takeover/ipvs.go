package takeover

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/ipvs"
)

// server is a virtual server of IPVS with its real servers.
type server struct {
	ipvs.Key
	dests []ipvs.Destination
}

func (s server) connections() (n int) {
	for _, d := range s.dests {
		n += int(d.Connections)
	}
	return n
}

// quiet reports whether no real server takes new connections.
func (s server) quiet() bool {
	return !slices.ContainsFunc(s.dests, func(d ipvs.Destination) bool { return d.Weight != 0 })
}

// allServers are all virtual servers with their real servers, but those for firewall marks. IPVS is not loaded to find
// out that there are none.
func allServers() (servers []server, err error) {
	table, err := os.ReadFile("/proc/thread-self/net/ip_vs")
	const header = 3 // lines
	if errors.Is(err, os.ErrNotExist) || err == nil && strings.Count(string(table), "\n") <= header {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("ipvs: %w", err)
	}
	err = withIPVS(func(c *ipvs.Client) error {
		found, err := c.Servers()
		for key := range found {
			if key.Mark == 0 {
				servers = append(servers, server{Key: key})
			}
		}
		slices.SortFunc(servers, func(a, b server) int { return a.Compare(b.Key) })
		for i := range servers {
			s := &servers[i]
			if err == nil {
				s.dests, err = c.Destinations(s.Key)
			}
		}
		return err
	})
	return servers, err
}

func withIPVS(f func(*ipvs.Client) error) error {
	c, err := ipvs.Open()
	if err == nil {
		err = errors.Join(f(c), c.Close())
	}
	if err != nil {
		return fmt.Errorf("ipvs: %w", err)
	}
	return nil
}

// performIPVS does requests. Requests about missing objects are taken as done.
func performIPVS(requests []ipvs.Request) error {
	if len(requests) == 0 {
		return nil
	}
	return withIPVS(func(c *ipvs.Client) error {
		refused, err := c.Perform(requests)
		errs := []error{err}
		for _, r := range refused {
			if r.Err != unix.ESRCH && r.Err != unix.ENOENT {
				errs = append(errs, r)
			}
		}
		return errors.Join(errs...)
	})
}

// quiesce makes the server take no new connections. Those that it has go on: in ip_vs_in_hook only a
// destination that is not available any more ends them, and a weight of 0 does not make it so.
func (s server) quiesce() (requests []ipvs.Request) {
	for _, d := range s.dests {
		if d.Weight != 0 {
			d.Weight = 0
			requests = append(requests, ipvs.NewRequest(ipvs.SetDestination, s.Key, d, nil))
		}
	}
	return requests
}
