package ebpf

import (
	"encoding/binary"
	"hash/fnv"
	"net/netip"
	"time"

	"fairlead.dev/fairlead/model"
)

// Rows as the programs see them: see bpf/maps.h. Addresses and ports are in network byte order, and IPv4 addresses are
// IPv4-mapped.

func address(a netip.Addr) (out objectsAddr) {
	b := a.As16()
	for i := range out.Word {
		out.Word[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return out
}

func port(p uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], p)
	return binary.NativeEndian.Uint16(b[:])
}

func endpoint(a netip.AddrPort) objectsEndpoint {
	return objectsEndpoint{Addr: address(a.Addr()), Port: port(a.Port())}
}

func frontendKey(k model.Key) objectsFrontendKey {
	return objectsFrontendKey{Addr: address(k.Addr), Port: port(k.Port), Protocol: uint8(k.Protocol)}
}

// hostKey is for what is said of an address and none of its ports.
func hostKey(a netip.Addr) objectsFrontendKey { return objectsFrontendKey{Addr: address(a)} }

func guardKey(p netip.Prefix) objectsGuardKey {
	bits := p.Bits()
	if p.Addr().Is4() {
		bits += 96
	}
	return objectsGuardKey{Bits: uint32(bits), Addr: address(p.Addr())}
}

func flags(f model.Frontend) (bits objectsFlags) {
	if f.Allow != nil {
		bits |= objectsFlagsLIMITED
	}
	switch f.SNAT {
	case model.OffCluster:
		bits |= objectsFlagsSNAT_OFFCLUSTER
	case model.Always:
		bits |= objectsFlagsSNAT_ALWAYS
	}
	return bits
}

// poolName is a number that names the pool in every process: clients are remembered by it.
func poolName(id model.PoolID) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(id.String())) // never fails
	return h.Sum64()
}

func word(is bool) uint16 {
	if is {
		return 1
	}
	return 0
}

// seconds rounds up: a client may be remembered a moment longer, but never forgotten too early.
func seconds(d time.Duration) uint32 { return uint32((d + time.Second - 1) / time.Second) }

func membership(b model.Backend) objectsMembership {
	if b.Weight == 0 {
		return objectsMembershipDRAINING
	}
	return objectsMembershipSERVING
}

func (a objectsAddr) addr() netip.Addr {
	var b [16]byte
	for i, word := range a.Word {
		binary.NativeEndian.PutUint32(b[4*i:], word)
	}
	return netip.AddrFrom16(b).Unmap()
}

func (e objectsEndpoint) addrPort() netip.AddrPort {
	return netip.AddrPortFrom(e.Addr.addr(), port(e.Port))
}

// model is the key of a Frontend, or of a guard if its port is 0.
func (k objectsFrontendKey) model() model.Key {
	return model.Key{Addr: k.Addr.addr(), Port: port(k.Port), Protocol: model.Protocol(k.Protocol)}
}

func (k objectsFrontendKey) String() string {
	m := k.model()
	return m.AddrPort().String() + "/" + m.Protocol.String()
}
