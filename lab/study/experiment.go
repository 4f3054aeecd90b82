package study

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Experiment is a published comparison, and how it is repeated here.
type Experiment struct {
	Description
	// Cells are what it compares, in the order of the report.
	Cells func(Depth) []Cell
	// ForIPVS are those that are repeated in the test kernel; nil: those of a standard run, and a standard run of all
	// experiments repeats none. Claims about IPVS are mostly about how it finds a Service, how it changes one, and how it
	// chooses.
	ForIPVS func(Depth) []Cell
}

// Cell is a comparison of contenders under the same conditions.
type Cell struct {
	Case    string // see Row
	Size    int    // see Row
	Cluster Cluster
	// Contenders are those of all that take part, or others in their place; nil: all take part.
	Contenders func(all []Contender) []Contender
	// Turn is what a contender does in one round. It leaves the site as it was.
	Turn func(context.Context, *Site) (Figures, error)
	// Takes is about how long a turn takes, for the time left until there has been one; 0: a second.
	Takes time.Duration
	// Limit is when a turn has failed because it takes too long; 0: two minutes, and at least four times what it Takes.
	Limit time.Duration
}

func (c Cell) takes() time.Duration { return cmp.Or(c.Takes, time.Second) }

func (c Cell) limit() time.Duration { return cmp.Or(c.Limit, max(2*time.Minute, 4*c.takes())) }

// Cluster is what Services there are. Cells that want the same ones share the sites, which are made once.
type Cluster struct {
	Services  int
	Endpoints int // of each Service
	// NodePorts are of each Service one, too.
	NodePorts bool
	// OwnPorts gives each endpoint of a Service a port of its own, by which the server tells them apart. Otherwise they
	// have addresses of their own.
	OwnPorts bool
	// own are Services beside the generated ones, or, if theirs, in place of them.
	own    *Own
	theirs bool
}

// servicesAxis is that of experiments whose size is Cluster.Services.
const servicesAxis = "Services"

// sized are cells of other sizes: for each case and size the one that is nearest, with that many Services.
func sized(cells []Cell, sizes []int) (all []Cell) {
	for _, n := range sizes {
		seen := map[string]bool{}
		for _, c := range cells {
			if seen[c.Case] {
				continue
			}
			seen[c.Case] = true
			for _, o := range cells {
				if o.Case == c.Case && distance(o.Size, n) < distance(c.Size, n) {
					c = o
				}
			}
			c.Size, c.Cluster.Services = n, n
			all = append(all, c)
		}
	}
	return all
}

func distance(a, b int) int { return max(a-b, b-a) }

// Experiments are all that there are, in the order of the report.
func Experiments() []Experiment {
	return []Experiment{
		connectExperiment(), rulesExperiment(), lookupExperiment(), updateExperiment(), bandwidthExperiment(),
		footprintExperiment(), jitterExperiment(), httpExperiment(), schedulersExperiment(), rollingExperiment(),
		switchExperiment(),
	}
}

// Choose returns the experiments with these names; all of them if there is no name.
func Choose(names []string) ([]Experiment, error) {
	all := Experiments()
	if len(names) == 0 {
		return all, nil
	}
	var chosen []Experiment
	for n, name := range names {
		i := slices.IndexFunc(all, func(e Experiment) bool { return e.Name == name })
		if i < 0 {
			return nil, fmt.Errorf("there is no experiment %q; there are %s", name, strings.Join(Names(all), ", "))
		}
		if !slices.Contains(names[:n], name) {
			chosen = append(chosen, all[i])
		}
	}
	return chosen, nil
}

// Names are those of experiments.
func Names(all []Experiment) (names []string) {
	for _, e := range all {
		names = append(names, e.Name)
	}
	return names
}
