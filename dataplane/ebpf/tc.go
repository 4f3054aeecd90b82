package ebpf

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"unsafe"

	"github.com/cilium/ebpf"

	"fairlead.dev/fairlead/dataplane/internal/localport"
	"fairlead.dev/fairlead/model"
)

// The programs for packets (bpf/tc.c) are loaded beside those for sockets and read the same tables.
//
//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -type endpoint -type outlet -type tuple -type translation -type node_addr_key -type notes -type work -type hook -type ticks -type state -type held -type direction -type phase -type terms -type answering -type rows -type region packets bpf/packets.c -- -mcpu=v3 -O2 -Wall -Wextra -Werror -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu

const (
	fragmented = 1 << 12 // datagrams whose fragments are on their way
	trafficked = 1 << 16 // backends whose traffic is counted; the one without any for longest is forgotten first
	addressed  = 1 << 14 // addresses to hide clients behind: one in each family of most devices
)

// packetOptions are what the programs for packets need to know beside the rows.
type packetOptions struct {
	Ports portRange // of the node, that stand for clients; zero: those that freePorts finds
	// Translations is how many the programs keep, unless they are given others' table; see Sizes.
	Translations uint32
	// Patience is for how many seconds flows may be silent; nil: as patience says.
	Patience *phases
	// Bare is for devices whose packets begin with the IP header.
	Bare bool
	// Programs are those to load, as the kernel takes its time to verify each; nil: all.
	Programs []string
	// DirectMTU is how large a packet may be that tells the backend's node to answer the client; 0: clients are hidden.
	DirectMTU uint32
	// Secret is a number that is not known outside.
	Secret uint64
	// Preempted is for kernels that interrupt a program by another one; those with PREEMPT_RT are found to.
	Preempted bool
	// Maps are used in place of new ones.
	Maps map[string]*ebpf.Map
}

// portRange is a range of ports of the node.
type portRange struct{ First, Count uint16 }

// enoughPorts is how many are to stand for clients, of each backend at a time, before sockets' ports do so as well.
const enoughPorts = 4096

// freePorts are those that stand for clients: the larger of the ranges on both sides of what the kernel gives to
// sockets that ask for no port. If that is small, or nothing, they are all that a user may have, as with MASQUERADE.
// shared is true then: a flow still has its port alone, but a socket of the node may have it, too.
func freePorts() (ports portRange, shared bool, err error) {
	low, high, err := localport.Range()
	if err != nil {
		return portRange{}, false, err
	}
	below, above := portRange{1024, max(low, 1024) - 1024}, portRange{high + 1, 65535 - high}
	ports = below
	if above.Count > below.Count {
		ports = above
	}
	if ports.Count < enoughPorts {
		return portRange{1024, 65535 - 1024 + 1}, true, nil
	}
	return ports, false, nil
}

// newPackets makes the programs for packets, which read rows from the set of tables that is in force. Nothing is
// attached.
func newPackets(tables *sets, o packetOptions) (*ebpf.Collection, error) {
	if o.Ports.Count == 0 {
		var err error
		if o.Ports, _, err = freePorts(); err != nil {
			return nil, err
		}
	}
	spec, err := packetSpec(o)
	if err != nil {
		return nil, err
	}
	use := maps.Clone(o.Maps)
	if use == nil {
		use = map[string]*ebpf.Map{}
	}
	tables.replaceIn(spec, use)
	return ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: use})
}

// packetSpec sets sizes and constants.
func packetSpec(o packetOptions) (*ebpf.CollectionSpec, error) {
	spec, err := packetObjects()
	if err != nil {
		return nil, err
	}
	if o.Programs != nil {
		maps.DeleteFunc(spec.Programs, func(name string, _ *ebpf.ProgramSpec) bool {
			return !slices.Contains(o.Programs, name)
		})
	}
	if spec.Programs[packetsProgFromOutside] == nil {
		delete(spec.Maps, packetsMapOutside)
	} else {
		spec.Maps[packetsMapOutside].MaxEntries = outsideDevices
	}
	for name, entries := range map[string]uint32{
		packetsMapTranslations: cmp.Or(o.Translations, 1),
		packetsMapAsking:       askingFor(cmp.Or(o.Translations, 1)),
		packetsMapFragments:    forgetting(fragmented),
		packetsMapTraffic:      forgetting(trafficked),
		packetsMapNodeAddrs:    addressed,
	} {
		spec.Maps[name].MaxEntries = entries
	}
	for name, m := range o.Maps {
		spec.Maps[name].MaxEntries = m.MaxEntries()
	}
	constants := map[string]any{
		packetsVarPortsFirst: o.Ports.First, packetsVarPortsCount: o.Ports.Count, packetsVarCrcShifts: crcShifts(),
		packetsVarSecret: o.Secret, packetsVarDirectMtu: o.DirectMTU, packetsVarPreemptRt: o.Preempted || preemptsPrograms(),
	}
	constants[packetsVarPlaces] = spec.Maps[objectsMapSockets].MaxEntries - 1
	asking := spec.Maps[packetsMapAsking].MaxEntries
	constants[packetsVarRings], constants[packetsVarRing] = processors(), max(asking/processors(), 1)
	constants[packetsVarRoom] = [2]uint32{
		objectsSharedOF_FLOWS:      roomOf(spec.Maps[packetsMapTranslations].MaxEntries, asking),
		objectsSharedOF_AFFINITIES: spec.Maps[objectsMapAffinities].MaxEntries,
	}
	if o.Patience == nil {
		o.Patience = patience()
	}
	constants[packetsVarPatience] = *o.Patience
	if o.Bare {
		constants[packetsVarLinkHeader] = uint32(0)
	}
	for name, value := range constants {
		if err := spec.Variables[name].Set(value); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return spec, nil
}

// packetObjects leaves out what only sockets are remembered in.
func packetObjects() (*ebpf.CollectionSpec, error) {
	spec, err := withWords(loadPackets())
	if err != nil {
		return nil, err
	}
	delete(spec.Maps, objectsMapFlows)
	delete(spec.Maps, objectsMapPeers)
	delete(spec.Maps, objectsMapClaims)
	return spec, nil
}

func sourceKey(key model.Key, scope model.Scope, p netip.Prefix) packetsSourceKey {
	guard := guardKey(p)
	f := frontendKey(key)
	k := packetsSourceKey{
		Frontend: packetsFrontendKey{Addr: packetsAddr(f.Addr), Port: f.Port, Protocol: f.Protocol},
		Addr:     packetsAddr(guard.Addr),
	}
	if scope == model.Internal {
		k.Internal = 1
	}
	k.Bits = uint32(8*unsafe.Offsetof(k.Addr)-8*unsafe.Offsetof(k.Frontend)) + guard.Bits
	return k
}
