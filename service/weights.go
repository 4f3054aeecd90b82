package service

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"fairlead.dev/fairlead/model"
)

// Annotations say what Kubernetes has no fields for.
const (
	schedulerAnnotation = "fairlead.dev/scheduler" // of a Service: how an endpoint is chosen
	weightsAnnotation   = "fairlead.dev/weights"   // of an EndpointSlice or Endpoints: see weights

	// Cilium's count where ours are missing: objects that were written for it keep their meaning.
	ciliumAlgorithm = "service.cilium.io/lb-algorithm" // of a Service: maglev, random or least-of-two
	ciliumWeight    = "service.cilium.io/weight"       // of an EndpointSlice: one for all endpoints, 0 to 65535
)

// annotation is the path of an annotation.
func annotation(name string) string { return "metadata.annotations[" + name + "]" }

// Scheduler is a place in model.Schedulers, counted from 1.
type Scheduler uint8

// name is empty for 0.
func (s Scheduler) name() string {
	if s == 0 {
		return ""
	}
	return model.Schedulers()[s-1]
}

// hasTable reports whether the kernel's IPVS has a large table for each virtual server with this scheduler.
func (s Scheduler) hasTable() bool {
	return slices.Contains([]string{"lblc", "lblcr", "mh"}, s.name())
}

// scheduler is the Service's own, if there is a table for it.
func (c *compiler) scheduler() string {
	if c.unhashed {
		return ""
	}
	return c.service.Scheduler.name()
}

// returning is the scheduler in force if clients that connect anew come back to their endpoints by it; else empty.
func (c *compiler) returning() string {
	name := c.scheduler()
	if name == "" && c.view.Mode == "ipvs" {
		name = c.view.Scheduler
	}
	back := []string{"dh", "fo", "lblc", "lblcr", "mh", "ovf", "sh"}
	if slices.Contains(back, name) && slices.Contains(model.ModesWith(name), c.view.Mode) {
		return name
	}
	return ""
}

// scheduler reads the annotation.
func (c *serviceReader) scheduler() {
	text, ok := c.from.Annotations[schedulerAnnotation]
	if !ok {
		c.ciliumScheduler()
		return
	}
	names := model.Schedulers()
	if text == leastOfTwo {
		text = model.LeastOfTwo
	}
	i := slices.Index(names, text)
	if i < 0 {
		c.add(annotation(schedulerAnnotation), "%.40q is none of %s; the one that is configured is used", text,
			strings.Join(names, ", "))
		return
	}
	c.to.Scheduler = Scheduler(i + 1)
}

// unscheduled says that the data plane of a mode does not honour the Service's scheduler, and what it does; empty: it
// does, or there is none.
func (s *Service) unscheduled(mode string) string {
	name := s.Scheduler.name()
	if name == "" || mode == "" {
		return ""
	}
	modes := model.ModesWith(name)
	how := "at random by weight"
	switch mode {
	case "userspace":
		how = "in turn by weight"
	case "kernelspace":
		how = "as HNS does"
	}
	with := ""
	if mode == "ebpf" && name == model.LeastOfTwo && s.Affinity > 0 {
		with, modes = " with session affinity", []string{"ipvs", "userspace"}
	}
	if slices.Contains(modes, mode) {
		return ""
	}
	return fmt.Sprintf("mode %s has no scheduler %q%s and chooses endpoints %s; it is in %s", mode, name, with, how,
		modeList(modes))
}

// modeList is for people, as "modes ebpf, ipvs and userspace".
func modeList(modes []string) string {
	last := len(modes) - 1
	if last == 0 {
		return "mode " + modes[0]
	}
	return "modes " + strings.Join(modes[:last], ", ") + " and " + modes[last]
}

// schedulerField is the annotation that names the scheduler.
func (s *Service) schedulerField() string {
	if s.ciliums {
		return annotation(ciliumAlgorithm)
	}
	return annotation(schedulerAnnotation)
}

// ciliumScheduler reads Cilium's annotation. Its random is what planes without schedulers do.
func (c *serviceReader) ciliumScheduler() {
	c.to.ciliums = true
	switch text := c.from.Annotations[ciliumAlgorithm]; text {
	case "", "random":
	case "maglev":
		c.to.Scheduler = Scheduler(slices.Index(model.Schedulers(), "mh") + 1)
	case leastOfTwo:
		c.to.Scheduler = Scheduler(slices.Index(model.Schedulers(), model.LeastOfTwo) + 1)
	default:
		c.add(annotation(ciliumAlgorithm),
			"%.40q is none of maglev, random and least-of-two; the one that is configured is used", text)
	}
}

// leastOfTwo is a name for model.LeastOfTwo that says what it does.
const leastOfTwo = "least-of-two"

const (
	// oneWeight is that of an endpoint of which no annotation says anything else.
	oneWeight = 1
	// maxWeight bounds what a pool costs a plane that has a slot for each unit of weight. serviceWeight bounds what all
	// pools of a Service do, if that leaves its backends leastWeight. Where annotations say more, all weights of the pool
	// become smaller, see selection.weight.
	maxWeight     = 256
	serviceWeight = 1 << 16
	leastWeight   = 16
)

// finestWeight is the largest weight of a backend in a Service that has so many for all its ports. It is a power of
// two, so that hardly any endpoint that comes or goes changes the weights of the others.
func finestWeight(backends int) uint64 {
	finest := uint64(maxWeight)
	for finest > leastWeight && finest*uint64(backends) > serviceWeight {
		finest /= 2
	}
	return finest
}

// weights are those of a slice's endpoints: "3" gives all of them one, "10.244.1.2=3,10.244.2.2=0" gives
// some their own, "3,10.244.2.2=0" does both.
type weights struct {
	others uint16 // of endpoints that are not named
	named  map[netip.Addr]uint16
}

// of is the weight of an endpoint.
func (w *weights) of(a netip.Addr) uint16 {
	if n, ok := w.named[a]; ok {
		return n
	}
	return w.others
}

// weights reads the annotation. If a part of it is wrong, nothing of it holds: shares are relative, and
// would be others than were meant.
func (r *report) weights(annotations map[string]string) weights {
	text, ok := annotations[weightsAnnotation]
	if !ok {
		return r.ciliumWeights(annotations)
	}
	w, err := parseWeights(text)
	if err != nil {
		r.add(annotation(weightsAnnotation), "%v; all weights are %d. It is WEIGHT, ADDRESS=WEIGHT, or several of these, "+
			"separated by commas", err, oneWeight)
		return weights{others: oneWeight}
	}
	return w
}

func (r *report) ciliumWeights(annotations map[string]string) weights {
	text, ok := annotations[ciliumWeight]
	if !ok {
		return weights{others: oneWeight}
	}
	n, err := strconv.ParseUint(strings.TrimSpace(text), 10, 16)
	if err != nil {
		r.add(annotation(ciliumWeight), "%.40q is no weight from 0 to 65535; all weights are %d", text, oneWeight)
		return weights{others: oneWeight}
	}
	return weights{others: uint16(n)}
}

// parseWeights reads items separated by commas: ADDRESS=WEIGHT for one endpoint, and at most one WEIGHT for all others.
func parseWeights(text string) (weights, error) {
	w := weights{others: oneWeight, named: map[netip.Addr]uint16{}}
	rest := false
	for item := range strings.SplitSeq(text, ",") {
		addr, number, named := strings.Cut(item, "=")
		if !named {
			addr, number = "", item
		}
		n, err := strconv.ParseUint(strings.TrimSpace(number), 10, 16)
		if err != nil || n > maxWeight {
			return w, fmt.Errorf("%.40q has no weight from 0 to %d", item, maxWeight)
		}
		if !named {
			if rest {
				return w, fmt.Errorf("%.40q is a second weight for all", item)
			}
			w.others, rest = uint16(n), true
			continue
		}
		if err := w.name(addr, uint16(n)); err != nil {
			return w, err
		}
	}
	return w, nil
}

// name sets the weight of one endpoint. An address that the slice does not have does no harm: pods come and
// go, and move from slice to slice.
func (w *weights) name(addr string, n uint16) error {
	a, err := netip.ParseAddr(strings.TrimSpace(addr))
	if err != nil || a.Zone() != "" {
		return fmt.Errorf("%.40q is not an IP address", addr)
	}
	if _, ok := w.named[a.Unmap()]; ok {
		return fmt.Errorf("%s has two weights", a)
	}
	w.named[a.Unmap()] = n
	return nil
}
