package study

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"fairlead.dev/fairlead/lab/testbed/traffic"
)

// schedulersExperiment compares how backends are chosen, by servers that are slow.
func schedulersExperiment() Experiment {
	return Experiment{
		Description: Description{
			Name: "schedulers",
			Does: "users without connection reuse, and 10 slow web servers: each plane's choice, and the schedulers of IPVS",
			Source: "a published comparison of the schedulers of IPVS with k6: 500 virtual users, 10 web servers that take a " +
				"second; it does not say how many requests one of them serves at once",
			Figures: []Figure{
				{Name: "p90", Unit: Seconds, Better: Lower, Main: true,
					Does: "connection, request and answer: a tenth take longer"},
				{Name: "duration", Unit: Seconds, Better: Lower, Does: "request and answer, mean (k6: http_req_duration)"},
				{Name: "waiting", Unit: Seconds, Better: Lower,
					Does: "from the request until the answer begins, mean (k6: http_req_waiting)"},
				rateFigure(),
				{Name: "busiest", Unit: Share, Better: Lower,
					Does: "part of all requests that the busiest server got; a tenth is even"},
				{Name: "median", Unit: Seconds, Better: Lower, Does: "connection, request and answer, median"},
				{Name: "max", Unit: Seconds, Better: Lower, Does: "connection, request and answer: the longest"},
				failedFigure(),
			},
		},
		Cells:   schedulersCells,
		ForIPVS: func(d Depth) []Cell { return schedulersCells(d)[:byDepth(d, 2, 1)] },
	}
}

// slowServers are the servers, and the load on them.
type slowServers struct {
	users   int
	takes   time.Duration
	workers int // requests that a server serves at once; 0: any number
	slower  int // servers that take twice as long
	lasts   time.Duration
}

const webServers = 10

func (o slowServers) String() string {
	if o.workers == 0 {
		return "any number at once"
	}
	name := fmt.Sprintf("%d at once", o.workers)
	if o.slower > 0 {
		name += fmt.Sprintf(", %d take twice as long", o.slower)
	}
	return name
}

// schedulersCells has three kinds of servers. Those of the first serve a sixth more than an even share of the users at
// once. Of the second two servers are slower. Those of the third are as the comparison describes them: a scheduler
// cannot make a difference but by the cost of the choice itself (in full runs only). Users have addresses of their own,
// as clients of a Service do.
func schedulersCells(d Depth) (cells []Cell) {
	quick := slowServers{users: 60, takes: 100 * time.Millisecond, workers: 7, lasts: 450 * time.Millisecond}
	few := byDepth(d, quick,
		slowServers{users: 500, takes: time.Second, workers: 58, lasts: 4500 * time.Millisecond})
	many, unequal := few, few
	many.workers, many.lasts, unequal.slower = 0, few.takes*3/2, 2
	for _, servers := range []slowServers{few, unequal, many}[:byDepth(d, 2, 3)] {
		cells = append(cells, Cell{
			Case: servers.String(), Cluster: Cluster{Services: 1, Endpoints: webServers, OwnPorts: true},
			Takes: servers.lasts + servers.takes, Contenders: withSchedulers(d), Turn: servers.turn,
		})
	}
	return cells
}

// withSchedulers has each contender with IPVS once for each scheduler of the comparison. A standard run has of
// kube-proxy those that its conclusion is about: all contenders use the kernel's schedulers.
func withSchedulers(d Depth) func([]Contender) []Contender {
	all := []string{"rr", "lc", "dh", "sh", "sed", "nq"}
	some := byDepth(d, []string{"rr", "sh", "sed"}, all)
	return func(contenders []Contender) (each []Contender) {
		for _, c := range contenders {
			switch {
			case c.Plane != ipvsPlane:
				each = append(each, c)
			case c.Kind == Peer:
				each = append(each, c.scheduling(some)...)
			default:
				each = append(each, c.scheduling(all)...)
			}
		}
		return each
	}
}

// scheduling is the contender with each of these schedulers.
func (c Contender) scheduling(schedulers []string) (each []Contender) {
	for _, scheduler := range schedulers {
		with := c
		with.Name, with.Args = c.Name+" "+scheduler, append(slices.Clone(c.Args), "--ipvs-scheduler="+scheduler)
		each = append(each, with)
	}
	return each
}

func (o slowServers) turn(ctx context.Context, s *Site) (Figures, error) {
	servers := o.servers()
	before, err := s.loads(ctx, servers)
	if err != nil {
		return nil, err
	}
	r, err := s.ask(ctx, errand{servers: servers, load: traffic.Load{
		Targets: s.Targets(0), Concurrency: o.users, Duration: o.lasts, Timeout: time.Minute, Addresses: userAddresses(),
	}})
	if err != nil {
		return nil, err
	}
	after, err := s.loads(ctx, servers)
	if err != nil {
		return nil, err
	}
	total := r.Total.Summary()
	return Figures{
		"p90": total.P90, "median": total.Median, "max": total.Max, "busiest": busiest(before, after),
		"duration": r.Processing.Summary().Mean, "waiting": r.Waiting.Summary().Mean,
		"rate": r.PerSecond(), "failed": float64(r.Failed()),
	}, nil
}

// servers are all of them, the slower ones first.
func (o slowServers) servers() (all []traffic.Server) {
	ports := traffic.Ports(BackendPort, webServers)
	if o.slower > 0 {
		all = append(all, traffic.Server{Ports: ports[:o.slower], Delay: 2 * o.takes, Workers: o.workers})
	}
	return append(all, traffic.Server{Ports: ports[o.slower:], Delay: o.takes, Workers: o.workers})
}

// userAddresses are as many as clientRange has for them.
func userAddresses() (all []netip.Addr) {
	for i := range 250 {
		all = append(all, nth(clientRange().Addr(), i+1))
	}
	return all
}

// loads are what each server has answered.
func (s *Site) loads(ctx context.Context, servers []traffic.Server) (map[uint16]traffic.Served, error) {
	w, err := s.server(ctx, servers...)
	if err != nil {
		return nil, err
	}
	return w.Served(ctx)
}

// busiest is the part of all requests that the busiest server has answered.
func busiest(before, after map[uint16]traffic.Served) float64 {
	var most, all int64
	for port, count := range after {
		n := count.Answered - before[port].Answered
		most, all = max(most, n), all+n
	}
	return float64(most) / float64(max(all, 1))
}
