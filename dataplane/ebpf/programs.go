package ebpf

import (
	"slices"

	"github.com/cilium/ebpf"

	"fairlead.dev/fairlead/model"
)

// The compiler is pinned, so that the same source makes the same object; ./dev installs it. The last include
// directory has asm/types.h, which is another one on each architecture, and the same for us.
//
//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -type addr -type endpoint -type target -type frontend_key -type frontend -type pool -type slot -type member_key -type member -type membership -type refusal -type affinity_key -type affinity -type verdict -type guard_key -type flow_key -type flow -type place objects bpf/sock.c -- -mcpu=v3 -O2 -Wall -Wextra -Werror -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu

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
	}
}

// capacity is how many rows of each kind the tables can hold.
type capacity struct{ frontends, pools, slots, members, guards uint32 }

// spareSlots are so many that the wait before slots are used again is rare in small clusters, too.
const spareSlots = 1 << 13

// roomFor leaves room to grow by a half before all has to be made anew.
func roomFor(rows int) uint32 { return uint32(rows + rows/2 + 1024) }

func capacityFor(s *model.State) capacity {
	var slots, largest, members int
	for _, p := range s.Pools {
		n := int(class(slotsFor(p, len(p.Backends))))
		slots, largest = slots+n, max(largest, n)
		members += len(p.Backends)
	}
	return capacity{
		frontends: roomFor(len(s.Frontends) + len(s.Guards)),
		pools:     roomFor(len(s.Pools)),
		slots:     roomFor(slots) + uint32(largest) + spareSlots, // a pool that changes has two ranges
		members:   roomFor(members),
		guards:    roomFor(len(s.Guards)),
	}
}

// program makes tables of that size, empty, and programs that use them and the memory. Nothing is attached.
func (p *Plane) program(size capacity, pods model.Pods) (*ebpf.Collection, error) {
	spec, err := loadObjects()
	if err != nil {
		return nil, err
	}
	for name, entries := range map[string]uint32{
		objectsMapFrontends: size.frontends,
		objectsMapPools:     size.pools,
		objectsMapSlots:     size.slots,
		objectsMapMembers:   size.members,
		objectsMapGuards:    size.guards,
	} {
		spec.Maps[name].MaxEntries = entries
	}
	p.sizes.memory(spec)
	for name, value := range map[string]any{
		objectsVarNodeNetns:    p.netns,
		objectsVarPodsKnown:    podsKnown(pods),
		objectsVarAlone:        p.serve != TC && p.behind == nil,
		objectsVarNodeAlone:    p.serve == TC || p.behind == nil,
		objectsVarOnlyNode:     p.onlyNode,
		objectsVarPlaces:       p.sizes.orDefault().Sockets - 1,
		objectsVarHasSetRetval: p.hasSetRetval,
	} {
		if err := spec.Variables[name].Set(value); err != nil {
			return nil, err
		}
	}
	return ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: p.memoryOf(spec)})
}

// podsKnown says for each family whether the rows tell pods from others. A socket in another network namespace
// than the node's then is a pod's: what interface and address it will use is not known before it connects.
func podsKnown(pods model.Pods) (known [2]bool) {
	for _, prefix := range pods.Prefixes {
		if prefix.Addr().Is6() {
			known[1] = true
		} else {
			known[0] = true
		}
	}
	if len(pods.Interfaces) > 0 {
		known = [2]bool{true, true}
	}
	return known
}

// hookNames are in the order in which the programs are attached: who gets a place must be seen to give it back.
func hookNames() []string {
	var names []string
	for name := range hooks() {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}
