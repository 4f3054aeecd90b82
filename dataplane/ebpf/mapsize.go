package ebpf

import (
	"cmp"
	"errors"
	"math/bits"
	"os"
	"runtime"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Sizes say how many clients and sockets the plane remembers. Their memory is taken at once. A process with other sizes
// than the one before takes over what fits, but of Sockets nothing: what is in a place is forgotten. Tables that
// forget have 256 elements for each processor at least.
type Sizes struct {
	// Affinities are clients of pools with affinity; 0: 65,536. Each takes 112 bytes. They are shared among owners; of
	// others than those that have room the choice of a backend follows from their address.
	Affinities uint32
	// Flows are two for each Service that a UDP socket asks which is not connected, and asks several or has no place; 0:
	// 65,536. Each takes 128 bytes. Of those that are forgotten answers seem to come from the backend.
	Flows uint32
	// Sockets are connected ones, and those of UDP that ask one Service, rounded up to a power of two; 0: 65,536. Each
	// takes 72 bytes. None is ever forgotten: those that find their place taken are remembered in memory of their own, or
	// as flows, which costs time.
	Sockets uint32
	// Services are so many, of one port and one backend each, that tables have room for, whatever the rows are; 0: none in
	// particular. Each takes some 350 bytes. Without it tables begin with room for what there is, and half as much
	// again; those that are full are made anew.
	Services uint32
	// Translations are two for each connection whose packets tc serves, four if its client is hidden. Each takes 192
	// bytes. 0: what a 128th of the machine's memory has room for. That is a power of two from 262,144 (up to 12 GiB) to
	// 2,097,152 (from 48 GiB on). A quarter is for connections whose client has not gone on after an answer, of which the
	// oldest goes first. The others are shared among owners.
	Translations uint32
}

const (
	minTranslations, maxTranslations = 1 << 18, 1 << 21
	translationBytes                 = 192
)

// translationsFor is how many fit into a reasonable part of a machine's memory. It is a power of two, so that hardly
// any process finds another number than the one before.
func translationsFor(memory uint64) uint32 {
	n := min(max(memory/128/translationBytes, minTranslations), maxTranslations)
	return 1 << (bits.Len64(n) - 1)
}

// askingFor is how many flows may be there that are not held: they take a quarter of the table.
func askingFor(translations uint32) uint32 { return max(translations/16, processors()) }

// roomOf is how many elements flows that are held may have.
func roomOf(translations, asking uint32) uint32 { return translations - min(translations, 4*asking) }

// processors is how many there are in use, or a few more: those that have numbers below the last one's.
func processors() uint32 {
	b, err := os.ReadFile("/sys/devices/system/cpu/online")
	text := strings.TrimSpace(string(b))
	last, failed := strconv.ParseUint(text[strings.LastIndexAny(text, ",-")+1:], 10, 16)
	if errors.Join(err, failed) == nil {
		return uint32(last) + 1
	}
	return uint32(runtime.NumCPU())
}

// machineMemory is 0 if the kernel does not say.
func machineMemory() uint64 {
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) != nil {
		return 0
	}
	return uint64(info.Totalram) * uint64(info.Unit)
}

// refusals is of how many frontends the refusals are counted. Those that refused no client for longest begin anew
// first.
const refusals = 1 << 13

// forgetting is the size of a table that forgets what was not used for longest. It is at least so large that each
// processor has its reserve: 128 free elements and as many new ones. A smaller table may lose the elements that were
// added last (kernel/bpf/bpf_lru_list.c, before Linux 6.17).
func forgetting(size uint32) uint32 {
	const putBy = 2 * 128
	processors, err := ebpf.PossibleCPU()
	if err != nil {
		return size
	}
	return max(size, putBy*uint32(processors))
}

func (s Sizes) orDefault() Sizes {
	const usual = 1 << 16
	sockets := min(cmp.Or(s.Sockets, usual), 1<<24)
	return Sizes{
		Services:   s.Services,
		Affinities: cmp.Or(s.Affinities, usual),
		Flows:      forgetting(cmp.Or(s.Flows, usual)),
		Sockets:    1 << bits.Len32(sockets-1),

		Translations: forgetting(cmp.Or(s.Translations, translationsFor(machineMemory()))),
	}
}

// memory gives the maps that outlive the programs their sizes, and returns them.
func (s Sizes) memory(spec *ebpf.CollectionSpec) map[string]*ebpf.MapSpec {
	s = s.orDefault()
	spec.Maps[objectsMapAffinities].MaxEntries = s.Affinities
	spec.Maps[objectsMapFlows].MaxEntries = s.Flows
	spec.Maps[objectsMapRefusals].MaxEntries = forgetting(refusals)
	spec.Maps[objectsMapSockets].MaxEntries = s.Sockets
	spec.Maps[objectsMapClaims].MaxEntries = s.Sockets
	memory := map[string]*ebpf.MapSpec{}
	for _, name := range []string{
		objectsMapAffinities, objectsMapFlows, objectsMapRefusals, objectsMapSockets, objectsMapClaims,
		objectsMapPeers, objectsMapShares, objectsMapLoads,
	} {
		memory[name] = spec.Maps[name]
	}
	return memory
}

// room is a capacity for what is expected, too. An address with a port is a row, and so is the address itself.
func (s Sizes) room(c capacity) capacity {
	n := s.Services
	least := capacity{objectsMapFrontends: 2 * n, objectsMapPools: n, objectsMapSlots: n, objectsMapMembers: n}
	for name, entries := range least {
		c[name] = max(c[name], entries)
	}
	return c
}
