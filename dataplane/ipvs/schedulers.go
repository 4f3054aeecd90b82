package ipvs

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/ipvs"
)

// client is the client of IPVS, and what is known of the kernel behind it.
type client struct {
	*ipvs.Client
	*lacking

	fault func(operation string) error
}

func openClient(fault func(string) error) (*client, error) {
	c, err := ipvs.Open()
	if errors.Is(err, unix.ENOENT) {
		return nil, fmt.Errorf("%w: it has no IPVS (module ip_vs, CONFIG_IP_VS)", dataplane.ErrUnsupported)
	}
	if err != nil {
		return nil, err
	}
	return &client{c, newLacking(), fault}, nil
}

// perform does the requests in their order and returns an error for each that the kernel refuses, unless another
// scheduler may do. The second error is one after which it is not known what has been done.
func (d *client) perform(requests []ipvs.Request) (refused []error, err error) {
	if len(requests) == 0 {
		return nil, nil
	}
	if err := d.fault("ipvs send"); err != nil {
		return nil, err
	}
	all, err := d.Perform(requests)
	for _, r := range all {
		if r.Err != unix.ENOENT || !d.refused(r.Request) {
			refused = append(refused, r)
		}
	}
	return refused, err
}

// lacking are schedulers that the kernel has no module for, as far as it was asked since the last Sync.
type lacking struct {
	names   map[string]bool
	servers []ipvs.Key // that have asked for one
	said    map[string]bool
}

func newLacking() *lacking { return &lacking{names: map[string]bool{}, said: map[string]bool{}} }

// refused notes that the kernel has not taken a virtual server because of its scheduler, and reports whether there may
// be another one for it.
func (l *lacking) refused(r ipvs.Request) bool {
	if r.Scheduler == "" || r.Scheduler == lastResort {
		return false
	}
	l.names[r.Scheduler] = true
	l.servers = append(l.servers, r.Server)
	return true
}

// substitutes is how many others may take the place of a scheduler, see instead.
const substitutes = 3

// lastResort is the scheduler that every kernel with IPVS is built with, mostly.
const lastResort = "rr"

// instead is the scheduler to use for one that is wanted: the configured one, or one that looks at weights, if the
// kernel lacks it.
func (l *lacking) instead(wanted, configured string) string {
	for _, name := range []string{wanted, configured, "wrr"} {
		if name != "" && !l.names[name] {
			return name
		}
	}
	return lastResort
}

// want is the virtual server that there should be; nil: none.
func (k *kernel) want(key ipvs.Key) *server {
	want := k.server(key, k.servers.options)
	if want != nil {
		want.scheduler = k.servers.client.lacking.instead(want.scheduler, k.servers.options.Scheduler)
	}
	return want
}

// substitute gives other schedulers to the virtual servers whose own the kernel has no module for.
func (p *Plane) substitute(k *kernel, todo *work) error {
	l := p.client.lacking
	for range substitutes + 1 {
		affected := l.servers
		if l.servers = nil; len(affected) == 0 {
			return nil
		}
		var again plan
		for _, key := range affected {
			p.reportSubstitute(k, key)
			k.servers.set(key, k.want(key), &again)
		}
		todo.servers.last = append(todo.servers.last, again.last...)
		if err := k.servers.perform(again.first); err != nil {
			return err
		}
	}
	affected := l.servers
	l.servers = nil
	slices.SortFunc(affected, ipvs.Key.Compare)
	return fmt.Errorf("%w: this kernel has no scheduler for virtual servers %v", dataplane.ErrPartial, affected)
}

func (p *Plane) reportSubstitute(k *kernel, key ipvs.Key) {
	wanted := k.server(key, k.servers.options)
	if wanted == nil || p.client.lacking.said[wanted.scheduler] {
		return
	}
	if k.want(key).scheduler == wanted.scheduler { // it is a stand-in that is lacking, see shaped
		return
	}
	p.client.lacking.said[wanted.scheduler] = true
	p.config.Log.Warn(fmt.Sprintf("this kernel has no scheduler %s; load module ip_vs_%[1]s, or choose another "+
		"(ipvs.scheduler, annotation fairlead.dev/scheduler)", wanted.scheduler),
		"scheduler", k.want(key).scheduler, "destination", k.wanted[key].String())
}
