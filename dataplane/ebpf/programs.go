package ebpf

import (
	"maps"
	"slices"

	"github.com/cilium/ebpf"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// The compiler is pinned, so that the same source makes the same object; ./dev installs it. The last include
// directory has asm/types.h, which is another one on each architecture, and the same for us.
//
//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -type addr -type endpoint -type target -type frontend_key -type frontend -type pool -type load_key -type load -type bearer -type slot -type chunk -type member_key -type member -type membership -type refusal -type share -type affinity_key -type affinity -type verdict -type guard_key -type flow_key -type flow -type place -type flags -type owners -type shared -type outcome -type result objects bpf/sock.c -- -mcpu=v3 -O2 -Wall -Wextra -Werror -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu

// hooks are the names of the programs, and where they are attached.
func hooks() map[string]ebpf.AttachType {
	return map[string]ebpf.AttachType{
		objectsProgClosed:       ebpf.AttachCgroupInetSockRelease,
		objectsProgConnect4:     ebpf.AttachCGroupInet4Connect,
		objectsProgConnect6:     ebpf.AttachCGroupInet6Connect,
		objectsProgSendmsg4:     ebpf.AttachCGroupUDP4Sendmsg,
		objectsProgSendmsg6:     ebpf.AttachCGroupUDP6Sendmsg,
		objectsProgRecvmsg4:     ebpf.AttachCGroupUDP4Recvmsg,
		objectsProgRecvmsg6:     ebpf.AttachCGroupUDP6Recvmsg,
		objectsProgGetpeername4: ebpf.AttachCgroupInet4GetPeername,
		objectsProgGetpeername6: ebpf.AttachCgroupInet6GetPeername,
		objectsProgSends:        ebpf.AttachCGroupInetEgress,
		objectsProgGets:         ebpf.AttachCGroupInetIngress,
	}
}

// capacity is how many elements each table of a set can hold.
type capacity map[string]uint32

// spareSlots are so many that the wait before slots are used again is rare in small clusters, too.
const spareSlots = 1 << 13

// roomFor leaves room to grow by a half before all has to be made anew.
func roomFor(rows int) uint32 { return uint32(rows + rows/2 + 1024) }

func capacityFor(s *model.State) capacity {
	var slots, largest, members int
	for _, p := range s.Pools {
		n := int(class(uint32(len(p.Backends))))
		slots, largest = slots+n, max(largest, n)
		members += len(p.Backends)
	}
	return capacity{
		objectsMapFrontends: roomFor(len(s.Frontends) + len(s.Guards)),
		objectsMapPools:     roomFor(len(s.Pools)),
		objectsMapSlots:     roomFor(slots) + uint32(largest) + spareSlots, // a pool that changes has two ranges
		objectsMapChunks:    chunksOfAll(s),
		objectsMapMembers:   roomFor(members),
		objectsMapGuards:    roomFor(len(s.Guards)),
		packetsMapPods:      roomFor(len(s.Pods.Prefixes)),
		packetsMapSources:   roomFor(countSources(s)),
	}
}

// chunksOfAll is room for the tables by which clients choose, should there be any.
func chunksOfAll(s *model.State) uint32 {
	var chunks, largest int
	seen := map[backendSet]bool{}
	for _, p := range s.Pools {
		if p.Scheduler != byClient {
			continue
		}
		serving := p.Serving()
		set := setOf(serving)
		if seen[set] || !isHashed(p, len(serving)) {
			continue
		}
		seen[set] = true
		n := int(class(chunksFor(len(serving))))
		chunks, largest = chunks+n, max(largest, n)
	}
	if chunks == 0 {
		return 1
	}
	return roomFor(chunks) + uint32(largest)
}

// loadSockets makes the programs for sockets, which use the memory and some tables. Nothing is attached. Programs that
// trace what becomes of connections are left out if the kernel does not take them.
func (p *Plane) loadSockets(tables *sets) (c *ebpf.Collection, err error) {
	if p.cannotTell == nil {
		if c, err = p.loadSocketsOnce(tables); err == nil {
			return c, nil
		}
		p.cannotTell = err
	}
	return p.loadSocketsOnce(tables)
}

func (p *Plane) loadSocketsOnce(tables *sets) (*ebpf.Collection, error) {
	spec, err := withWords(loadObjects())
	if err != nil {
		return nil, err
	}
	p.sizes.memory(spec)
	if p.cannotTell != nil {
		for _, name := range []string{objectsProgResends, objectsProgIsReset, objectsProgIsAnswered} {
			delete(spec.Programs, name)
		}
	}
	if !p.countsSockets() {
		maps.DeleteFunc(spec.Programs, func(name string, _ *ebpf.ProgramSpec) bool { return onlyCounts(name) })
	}
	for name, value := range map[string]any{
		objectsVarCountsTraffic: p.countsSockets(),
		objectsVarNodeNetns:     p.netns,
		objectsVarAlone:         p.serve != TC && p.behind == nil,
		objectsVarNodeAlone:     p.serve == TC || p.behind == nil,
		objectsVarOnlyNode:      p.onlyNode,
		objectsVarPlaces:        p.sizes.orDefault().Sockets - 1,
		objectsVarHasSetRetval:  p.hasSetRetval,
		objectsVarSecret:        p.secret,
		objectsVarRoom:          [2]uint32{objectsSharedOF_AFFINITIES: p.sizes.orDefault().Affinities},
	} {
		if err := spec.Variables[name].Set(value); err != nil {
			return nil, err
		}
	}
	use := p.memoryOf(spec)
	tables.replaceIn(spec, use)
	return ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: use})
}

// hookNames are in the order in which the programs are attached: who gets a place must be seen to give it back.
func (p *Plane) hookNames() []string {
	names := slices.Sorted(maps.Keys(hooks()))
	if p.countsSockets() {
		return names
	}
	return slices.DeleteFunc(names, onlyCounts)
}

// countsSockets says whether programs count what sockets send and get.
func (p *Plane) countsSockets() bool { return p.config.Counters == dataplane.PerBackend }

// onlyCounts says of a program that it does no more, for each packet of a socket.
func onlyCounts(name string) bool { return name == objectsProgSends || name == objectsProgGets }
