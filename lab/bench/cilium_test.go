package bench

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// ciliumBenchmark is Cilium's own benchmark of its load balancer, which the module in cilium/ names.
type ciliumBenchmark struct{ program string }

// newCiliumBenchmark builds it, which takes some minutes where Go's cache has nothing of it.
func newCiliumBenchmark(b *testing.B) ciliumBenchmark {
	b.Helper()
	c := ciliumBenchmark{filepath.Join(b.TempDir(), "cilium-benchmark")}
	build := exec.CommandContext(b.Context(), "go", "build", "-buildvcs=false", "-o", c.program,
		"github.com/cilium/cilium/pkg/loadbalancer/benchmark/cmd")
	build.Dir, build.Env = "cilium", append(os.Environ(), "GOWORK=off", "GOFLAGS=")
	progress("building Cilium's benchmark: some minutes the first time")
	if out, err := build.CombinedOutput(); err != nil {
		b.Fatalf("build Cilium's benchmark: %v\n%s", err, out)
	}
	return c
}

// run has it insert and delete all Services with real maps, in namespaces of its own, where it has nothing to attach to
// and a private file system for pins.
func (c ciliumBenchmark) run() (l load, err error) {
	command := exec.Command("/bin/sh", "-c", `mount -t bpf bpf /sys/fs/bpf && exec "$@"`, "sh", c.program,
		fmt.Sprint("-services=", controlServices), fmt.Sprint("-iterations=", controlRepeats))
	command.Env = append(os.Environ(), "PRIVILEGED_TESTS=true") // else its maps are those of Go
	command.SysProcAttr = &unix.SysProcAttr{Unshareflags: unix.CLONE_NEWNS | unix.CLONE_NEWNET, Pdeathsig: unix.SIGKILL}
	out, err := command.CombinedOutput()
	if err != nil {
		return l, fmt.Errorf("%w\n%s", err, out)
	}
	return parseCilium(out)
}

// parseCilium reads three lines: the most memory, which is that of the first repeat, when the process has nothing yet; and
// the means of insertions and deletions.
func parseCilium(out []byte) (l load, err error) {
	memory := regexp.MustCompile(`Max: Allocated .*per service: +(\d+) objs, +(\d+)B alloc, +(\d+)B in-use`).FindSubmatch(out)
	times := regexp.MustCompile(`Avg: Reconciled \d+ objects in (\S+)`).FindAllSubmatch(out, -1)
	if memory == nil || len(times) != 2 {
		return l, fmt.Errorf("Cilium's benchmark said something unexpected:\n%s", bytes.TrimSpace(out))
	}
	for i, to := range []*float64{&l.objects, &l.allocated, &l.used} {
		if *to, err = strconv.ParseFloat(string(memory[i+1]), 64); err != nil {
			return l, err
		}
	}
	for i, to := range []*time.Duration{&l.insert, &l.remove} {
		if *to, err = time.ParseDuration(string(times[i][1])); err != nil {
			return l, err
		}
	}
	return l, nil
}
