package relay

import (
	"encoding/binary"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/allocs"
)

// FuzzMessage reads arbitrary bytes as what the kernel tells of a message of SCTP: no panic, bounded memory.
func FuzzMessage(f *testing.F) {
	control := make([]byte, unix.CmsgSpace(sizeofRcvInfo))
	binary.NativeEndian.PutUint64(control, uint64(unix.CmsgLen(sizeofRcvInfo)))
	binary.NativeEndian.PutUint32(control[8:], unix.IPPROTO_SCTP)
	binary.NativeEndian.PutUint32(control[12:], sctpRcvInfo)
	f.Add(control)
	f.Fuzz(func(t *testing.T, told []byte) {
		allocs.Bound(t, len(told), func() { new(message).travel(told) })
	})
}
