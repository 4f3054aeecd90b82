package ebpf

import (
	"net/netip"
	"strings"
	"testing"
	"unsafe"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/allocs"
	"fairlead.dev/fairlead/model"
)

// FuzzElements reads arbitrary bytes as elements of the programs' tables, and as sockets that the kernel lists. There
// is no panic, and what is an address goes back into the table as it was.
func FuzzElements(f *testing.F) {
	key := frontendKey(model.Key{Addr: netip.MustParseAddr("10.96.0.10"), Protocol: model.TCP, Port: 80})
	f.Add(append([]byte(nil), bytesOf(&key)...))
	socket := diagSocket{family: 2}
	f.Add(socket.request())
	f.Fuzz(func(t *testing.T, data []byte) {
		allocs.Bound(t, len(data), func() {
			var key objectsFrontendKey
			copy(bytesOf(&key), data)
			if at := key.model(); !strings.Contains(key.String(), at.AddrPort().String()) || address(at.Addr) != key.Addr {
				t.Errorf("%s is not %v", key, at)
			}
			var backend objectsEndpoint
			copy(bytesOf(&backend), data)
			if at := backend.addrPort(); endpoint(at).Addr != backend.Addr || endpoint(at).Port != backend.Port {
				t.Errorf("%v is not %s", backend, at)
			}
			var refused objectsRefusal
			copy(bytesOf(&refused), data)
			_ = refused.row(1, false)
			var client objectsAddr
			copy(bytesOf(&client), data)
			_, _ = client.cookie()
			_ = (&dataplane.Counters{Refused: []dataplane.Refused{refused.row(1, false)}}).String()
			var socket diagSocket
			socket.family = uint8(len(data))
			copy(socket.id[:], data)
			_, _, _ = socket.local(), socket.peer(), socket.cookie()
		})
	})
}

func bytesOf[T any](v *T) []byte { return unsafe.Slice((*byte)(unsafe.Pointer(v)), unsafe.Sizeof(*v)) }
