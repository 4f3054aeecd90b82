package ipvs

import (
	"fmt"
	"slices"

	"fairlead.dev/fairlead/dataplane"
)

// lacking are schedulers that the kernel has no module for, as far as it was asked since the last Sync.
type lacking struct {
	names   map[string]bool
	servers []serverKey // that have asked for one
	said    map[string]bool
}

func newLacking() *lacking { return &lacking{names: map[string]bool{}, said: map[string]bool{}} }

// refused notes that the kernel has not taken a virtual server because of its scheduler, and reports whether there may
// be another one for it.
func (l *lacking) refused(r request) bool {
	if r.scheduler == "" || r.scheduler == lastResort {
		return false
	}
	l.names[r.scheduler] = true
	l.servers = append(l.servers, r.server)
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
func (k *kernel) want(key serverKey) *server {
	want := k.server(key, k.servers.options)
	if want != nil {
		want.scheduler = k.servers.director.lacking.instead(want.scheduler, k.servers.options.Scheduler)
	}
	return want
}

// substitute gives other schedulers to the virtual servers whose own the kernel has no module for.
func (p *Plane) substitute(k *kernel, todo *work) error {
	l := p.director.lacking
	for range substitutes + 1 {
		affected := l.servers
		if l.servers = nil; len(affected) == 0 {
			return nil
		}
		var again plan
		for _, key := range affected {
			p.tellSubstitute(k, key)
			k.servers.set(key, k.want(key), &again)
		}
		todo.servers.last = append(todo.servers.last, again.last...)
		if err := k.servers.perform(again.first); err != nil {
			return err
		}
	}
	affected := l.servers
	l.servers = nil
	slices.SortFunc(affected, serverKey.compare)
	return fmt.Errorf("%w: this kernel has no scheduler for virtual servers %v", dataplane.ErrPartial, affected)
}

func (p *Plane) tellSubstitute(k *kernel, key serverKey) {
	wanted := k.server(key, k.servers.options)
	if wanted == nil || p.director.lacking.said[wanted.scheduler] {
		return
	}
	if k.want(key).scheduler == wanted.scheduler { // it is a stand-in that is lacking, see shaped
		return
	}
	p.director.lacking.said[wanted.scheduler] = true
	p.config.Log.Warn(fmt.Sprintf("this kernel has no scheduler %s; load module ip_vs_%[1]s, or choose another "+
		"(ipvs.scheduler, annotation fairlead.dev/scheduler)", wanted.scheduler),
		"used instead", k.want(key).scheduler, "for example for", k.wanted[key].String())
}
