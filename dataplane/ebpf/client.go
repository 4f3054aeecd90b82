package ebpf

// clientOf is what stands for all sockets of a network namespace; see client in bpf/sock.c.
func clientOf(cookie uint64) objectsAddr {
	return objectsAddr{Word: [4]uint32{^uint32(0), 0, uint32(cookie >> 32), uint32(cookie)}}
}

// cookie is that of the namespace that a client is, if it is one.
func (a objectsAddr) cookie() (cookie uint64, ok bool) {
	return uint64(a.Word[2])<<32 | uint64(a.Word[3]), a.Word[0] == ^uint32(0) && a.Word[1] == 0
}
