package ebpf_test

import (
	"encoding/binary"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	bpf "github.com/cilium/ebpf"

	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/model"
)

// A socket that asks one Service keeps its place when it gets another backend. It gets one because the former has left
// or the socket was silent: what table flows forgets changes nothing.
func TestDatagrams_again(t *testing.T) {
	for _, name := range []string{"left", "silent"} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t)
			p := c.openSized(ebpf.Sizes{Sockets: 1})
			defer p.Close()
			before := parse(t, dns)
			check(t, p.Sync(t.Context(), before))
			conn := c.listen("client", "udp4")
			first, err := ask(conn, "10.96.0.10:53")
			check(t, err)
			gone, _, _ := strings.Cut(first, " ")
			addr := map[string]string{"pod-a": "10.244.1.11", "pod-b": "10.244.1.12"}[gone]
			after := parse(t, strings.Replace(dns, "backend default/web:dns cluster "+addr+":5353 local\n", "", 1))
			send := func() {
				_, err := conn.WriteToUDPAddrPort([]byte("?\n"), netip.MustParseAddrPort("10.96.0.10:53"))
				check(t, err)
			}
			receive := func() {
				if _, from, err := conn.ReadFromUDPAddrPort(make([]byte, 128)); err != nil || from.String() != "10.96.0.10:53" {
					t.Errorf("the answer comes from %s, %v", from, err)
				}
			}
			send()
			if name == "silent" {
				c.silence()
			} else {
				check(t, p.Apply(t.Context(), after, model.Diff(before, after)))
			}
			send()
			receive() // of the former backend
			receive()
			for range 2 {
				send()
				c.forgetFlows()
				receive()
			}
			c.expectPlaces("asks", 1)
		})
	}
}

// silence has the socket in the only place seem to have been silent for more than two minutes.
func (c cluster) silence() {
	c.t.Helper()
	m := c.openMemory("sockets")
	defer m.Close()
	const asked = 14 // where struct place has it
	at := make([]byte, m.ValueSize())
	check(c.t, m.Lookup(uint32(0), &at))
	binary.NativeEndian.PutUint16(at[asked:], binary.NativeEndian.Uint16(at[asked:])-200)
	check(c.t, m.Put(uint32(0), at))
}

// forgetFlows empties the table.
func (c cluster) forgetFlows() {
	c.t.Helper()
	m, err := bpf.LoadPinnedMap(filepath.Join(c.pins, "memory", "flows"), nil)
	check(c.t, err)
	defer m.Close()
	for key := make([]byte, m.KeySize()); m.NextKey(nil, key) == nil; {
		check(c.t, m.Delete(key))
	}
}
