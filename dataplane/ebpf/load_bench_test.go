package ebpf

import (
	"maps"
	"regexp"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// BenchmarkLoad is what the loading of each program costs, as at each start of the agent. It measures the instructions
// that the kernel's verifier follows, a million at most, and processor time, most of it the verifier's.
func BenchmarkLoad(b *testing.B) {
	sockets, err := withWords(loadObjects())
	if err != nil {
		b.Fatal(err)
	}
	packets, err := packetObjects()
	if err != nil {
		b.Fatal(err)
	}
	constants := map[string]any{packetsVarPortsFirst: uint16(1024), packetsVarPortsCount: uint16(30000)}
	setConstants(b, packets, constants)
	direct := packets.Copy()
	constants[packetsVarDirectMtu] = uint32(1500)
	setConstants(b, direct, constants)
	b.Run("sockets", func(b *testing.B) { loadEach(b, sockets) })
	b.Run("packets", func(b *testing.B) { loadEach(b, packets) })
	b.Run("packets answered directly", func(b *testing.B) { loadEach(b, direct) })
}

func setConstants(b *testing.B, spec *ebpf.CollectionSpec, constants map[string]any) {
	b.Helper()
	for name, value := range constants {
		if err := spec.Variables[name].Set(value); err != nil {
			b.Fatal(err)
		}
	}
}

// loadEach loads programs one by one, with the same maps.
func loadEach(b *testing.B, spec *ebpf.CollectionSpec) {
	all, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{
		Programs: ebpf.ProgramOptions{LogLevel: ebpf.LogLevelStats},
	})
	if err != nil {
		b.Fatalf("%+v", err)
	}
	defer all.Close()
	programs := spec.Programs
	for _, name := range slices.Sorted(maps.Keys(programs)) {
		spec.Programs = map[string]*ebpf.ProgramSpec{name: programs[name]}
		b.Run(name, func(b *testing.B) {
			began := processorTime(b)
			for b.Loop() {
				c, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: all.Maps})
				if err != nil {
					b.Fatal(err)
				}
				c.Close()
			}
			took := processorTime(b) - began
			b.ReportMetric(float64(took.Microseconds())/1000/float64(b.N), "cpu-ms/op")
			b.ReportMetric(verified(b, all.Programs[name].VerifierLog), "verified")
		})
	}
}

// processorTime is what the process and the kernel for it have taken so far.
func processorTime(b *testing.B) time.Duration {
	b.Helper()
	var used unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &used); err != nil {
		b.Fatal(err)
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

// verified is the number of instructions that a log tells. The kernel itself knows it since Linux 5.16.
func verified(b *testing.B, log string) float64 {
	b.Helper()
	found := regexp.MustCompile(`processed (\d+) insns`).FindStringSubmatch(log)
	if found == nil {
		b.Fatalf("the verifier says %q", log)
	}
	n, err := strconv.ParseFloat(found[1], 64)
	if err != nil {
		b.Fatal(err)
	}
	return n
}
