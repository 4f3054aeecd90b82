package demo

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/cluster"
	"fairlead.dev/fairlead/lab/testbed/traffic"
	"fairlead.dev/fairlead/model"
)

// story shows what happens to connections when a pod leaves, and when the proxy dies. It knows the
// shop.
func (d *demo) story(ctx context.Context, shop cluster.Manifest) error {
	if err := d.podLeaves(ctx, shop); err != nil {
		return fmt.Errorf("a pod leaves: %w", err)
	}
	dies := d.proxyDies
	if d.Mode == carries {
		dies = d.carrierDies
	}
	if err := dies(ctx); err != nil {
		return fmt.Errorf("the proxy dies: %w", err)
	}
	return nil
}

// podLeaves scales a Deployment down, as Kubernetes does it: the pod terminates, then it is gone.
func (d *demo) podLeaves(ctx context.Context, shop cluster.Manifest) error {
	const leaver = "shop/dns-2"
	udp, tcp := d.clusterIP("shop/dns", model.UDP), d.clusterIP("shop/dns", model.TCP)
	d.printf("\nA pod leaves: Deployment dns goes from 2 replicas to 1, while clients come and go.\n")
	load, err := d.watch(ctx, visit(client, udp), visit(client, tcp), visit(testbed.Node, tcp))
	if err != nil {
		return err
	}
	defer load.Stop()
	datagrams, err := d.flowTo(ctx, udp, leaver)
	if err != nil {
		return err
	}
	defer datagrams.Close()
	stream, err := d.flowTo(ctx, tcp, leaver)
	if err != nil {
		return err
	}
	defer stream.Close()

	if err := d.terminate(ctx, leaver); err != nil {
		return err
	}
	if err := load.Settle(ctx, 1); err != nil { // requests that the pod has yet to answer
		return err
	}
	if err := load.More(ctx, someMore); err != nil {
		return err
	}
	d.tell("it terminates", "its UDP flow is answered by %s, its open TCP connection by %s",
		d.expect(datagrams.ask(), leaver), d.expect(stream.ask(), leaver))

	one := bytes.Replace(shop.Data, []byte("replicas: 2 # and 1"), []byte("replicas: 1 # and 1"), 1)
	gone := d.bed.Addr(leaver, false)
	if err := d.apply(ctx, []cluster.Manifest{{Name: shop.Name, Data: one}}); err != nil {
		return err
	}
	if err := d.proxy.follow(ctx, func(s *model.State) bool { return !anyBackend(s, gone, 0) }); err != nil {
		return err
	}
	if err := load.More(ctx, someMore); err != nil {
		return err
	}
	if who := datagrams.ask(); d.plane == socketwise && strings.Contains(who, "read udp") {
		// The socket is connected to the pod itself, and learns that it is gone.
		d.tell("it is gone", "the UDP socket that was connected to it fails: %s", who)
	} else {
		d.tell("it is gone", "the UDP flow is answered by %s", d.expect(who, "shop/dns-1"))
	}
	d.count(load.Stop())
	return nil
}

// terminate publishes that a pod is being deleted, and returns when no new connection reaches it.
func (d *demo) terminate(ctx context.Context, place testbed.Place) error {
	for _, s := range d.result.Slices {
		for i, e := range s.Endpoints {
			if e.TargetRef != nil && e.TargetRef.Namespace+"/"+e.TargetRef.Name == string(place) {
				s.Endpoints[i].Conditions.Ready, s.Endpoints[i].Conditions.Terminating = new(false), new(true)
			}
		}
	}
	if err := d.write(); err != nil {
		return err
	}
	addr := d.bed.Addr(place, false)
	return d.proxy.follow(ctx, func(s *model.State) bool { return !anyBackend(s, addr, 1) })
}

// anyBackend reports whether any pool has an address with at least that weight.
func anyBackend(s *model.State, a netip.Addr, weight uint16) bool {
	for _, p := range s.Pools {
		if slices.ContainsFunc(p.Backends, func(b model.Backend) bool { return b.Addr == a && b.Weight >= weight }) {
			return true
		}
	}
	return false
}

// proxyDies kills the proxy, and starts another one that finds what the first has left.
func (d *demo) proxyDies(ctx context.Context) error {
	web := d.address(func(e cluster.Address) bool { return e.Service == "shop/web" && e.Kind == cluster.ClusterIP })
	nodePort := d.address(func(e cluster.Address) bool { return e.Service == "shop/web" && e.Kind == cluster.NodePort })
	d.printf("\nThe proxy is killed (kill -9) and started again, while clients come and go.\n")
	load, err := d.watch(ctx, visit(client, web), visit(testbed.Node, web), visit(testbed.Outside, nodePort))
	if err != nil {
		return err
	}
	defer load.Stop()
	stream, err := d.flowTo(ctx, web, web.Backends[0].Place)
	if err != nil {
		return err
	}
	defer stream.Close()
	if err := load.More(ctx, someMore); err != nil {
		return err
	}
	if err := d.proxy.kill(); err != nil {
		return err
	}
	before := load.Report().Total().Answered
	if err := load.More(ctx, someMore); err != nil {
		return err
	}
	answered := load.Report().Total().Answered - before
	d.tell("it is dead", "%d connections find their way through what it left in the kernel", answered)
	start := time.Now()
	if err := d.proxy.start(ctx); err != nil {
		return err
	}
	took := time.Since(start)
	if err := load.More(ctx, someMore); err != nil {
		return err
	}
	d.tell("it is back", "ready after %s; a TCP connection open all the time is answered by %s",
		took.Round(time.Millisecond), d.expect(stream.ask(), web.Backends[0].Place))
	d.count(load.Stop())
	return nil
}

// carrierDies is proxyDies where connections need the process.
func (d *demo) carrierDies(ctx context.Context) error {
	web := d.address(func(e cluster.Address) bool { return e.Service == "shop/web" && e.Kind == cluster.ClusterIP })
	d.printf("\nThe proxy, which carries all connections, is killed (kill -9) and started again.\n")
	stream, err := d.flowTo(ctx, web, web.Backends[0].Place)
	if err != nil {
		return err
	}
	defer stream.Close()
	if err := d.proxy.kill(); err != nil {
		return err
	}
	who := stream.ask()
	if !strings.Contains(who, unix.ECONNRESET.Error()) {
		d.faults = append(d.faults, "expected: an open connection is reset; got: "+who)
	}
	d.tell("it is dead", "the end of a TCP connection that was open: %s", who)
	meanwhile, err := d.watch(ctx, visit(client, web), visit(testbed.Node, web))
	if err != nil {
		return err
	}
	defer meanwhile.Stop()
	start := time.Now()
	if err := d.proxy.start(ctx); err != nil {
		return err
	}
	took := time.Since(start).Round(time.Millisecond)
	d.tell("it is back", "ready after %s; clients that began to connect meanwhile have waited", took)
	if err := meanwhile.More(ctx, someMore); err != nil {
		return err
	}
	d.count(meanwhile.Stop())
	return nil
}

// visit is where clients connect again and again.
func visit(from testbed.Place, to cluster.Address) traffic.Path {
	return traffic.Path{From: from, To: to.To, Protocol: to.Protocol}
}

// someMore is how many connections tell that all is well.
const someMore = 1000

// watch has clients connect, each again when it has been answered.
func (d *demo) watch(ctx context.Context, visits ...traffic.Path) (*traffic.Watch, error) {
	return traffic.StartWatch(ctx, d.bed, traffic.WatchSpec{
		Visits: visits, Interval: time.Millisecond, Ahead: 1, Timeout: answerTime,
	})
}

// count tells what clients have seen.
func (d *demo) count(r traffic.Report) {
	d.tell("all in all", "%d connections, %d failed", r.Total().Attempts, len(r.Faults))
	for _, f := range r.Faults {
		to := d.address(func(e cluster.Address) bool { return visit(f.Path.From, e) == f.Path })
		d.faults = append(d.faults, fmt.Sprintf("%s %s/%s from %s: %s", to.Service, to.To, to.Protocol, f.Path.From, f.What))
	}
}

// expect notes a fault if another pod answers.
func (d *demo) expect(who, want string) string {
	if who != want {
		d.faults = append(d.faults, fmt.Sprintf("expected: %s answers; got: %s", want, who))
	}
	return who
}

func (d *demo) clusterIP(name string, p model.Protocol) cluster.Address {
	return d.address(func(e cluster.Address) bool {
		return e.Service == name && e.Kind == cluster.ClusterIP && e.Protocol == p
	})
}

func (d *demo) address(is func(cluster.Address) bool) cluster.Address {
	return d.result.Addresses[slices.IndexFunc(d.result.Addresses, is)]
}

// flow is a connection or UDP flow of the client pod that stays open.
type flow struct {
	net.Conn
	lines *bufio.Reader
}

// flowTo opens connections until one of them is answered by a pod.
func (d *demo) flowTo(ctx context.Context, e cluster.Address, pod string) (*flow, error) {
	for range maxPerBackend * len(e.Backends) {
		c, err := d.bed.Dial(ctx, client, e.Protocol, e.To)
		if err != nil {
			return nil, err
		}
		f := &flow{c, bufio.NewReader(c)}
		if e.Protocol == model.TCP {
			_ = c.SetReadDeadline(time.Now().Add(answerTime))
			if _, err := f.lines.ReadString('\n'); err != nil { // the greeting
				return nil, errors.Join(err, c.Close())
			}
		}
		if f.ask() == pod {
			return f, nil
		}
		if err := c.Close(); err != nil {
			return nil, err
		}
	}
	return nil, fmt.Errorf("%s does not answer at %s/%s", pod, e.To, e.Protocol)
}

// ask sends something, and returns the pod that answers, or the error.
func (f *flow) ask() string {
	if err := f.SetDeadline(time.Now().Add(answerTime)); err != nil {
		return err.Error()
	}
	if _, err := f.Write([]byte("?\n")); err != nil {
		return err.Error()
	}
	line, err := f.lines.ReadString('\n')
	if err != nil {
		return err.Error()
	}
	pod, _, _ := strings.Cut(line, " ")
	return pod
}
