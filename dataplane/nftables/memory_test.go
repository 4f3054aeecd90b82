package nftables

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/testbed/nstest"
	"fairlead.dev/fairlead/model"
)

// Clients of one Service, with addresses that no host has, push no other Service's clients out. More of them are served
// than are remembered.
func TestMemory_oneForEach(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		for _, command := range []string{"link set lo up", "addr add 10.244.1.1/32 dev lo", "route add local 10.0.0.0/8 dev lo"} {
			if out, err := exec.Command("ip", strings.Fields(command)...).CombinedOutput(); err != nil {
				t.Errorf("ip %s: %v: %s", command, err, out)
			}
		}
		s := model.NewState()
		var keys []model.Key
		for i := range 256 {
			id := model.PoolID{Service: fmt.Sprintf("default/svc-%d", i)}
			backend := model.Backend{Addr: netip.MustParseAddr("10.244.1.1"), Port: 53, Weight: 1}
			s.Pools[id] = model.Pool{Backends: []model.Backend{backend}, Affinity: time.Hour}
			key := model.Key{Addr: address(false, 10, 96, byte(i>>8), byte(i)), Port: 53, Protocol: model.UDP}
			s.Frontends[key] = model.Frontend{Service: id.Service, Verdict: model.Forward, Pool: id}
			keys = append(keys, key)
		}
		p := newPlane(t, dataplane.Config{})
		defer p.Close()
		check(t, p.Sync(context.Background(), s))
		flooded := s.Frontends[keys[0]].Pool
		for _, key := range keys { // the map that was made last is the smallest one
			pool := s.Frontends[key].Pool
			if p.tables[0].pools[pool].names.number > p.tables[0].pools[flooded].names.number {
				keys[0], flooded = key, pool
			}
		}
		other := keys[1]
		if s.Frontends[other].Pool == flooded {
			other = keys[2]
		}
		victim := s.Frontends[other].Pool
		served, err := net.ListenPacket("udp", "10.244.1.1:53")
		check(t, err)
		defer served.Close()
		bound := boundOf(t, memoryName(p.tables[0].pools[flooded].names.number))
		for i := range bound + 100 {
			ask(t, address(false, 10, 200+byte(i>>16), byte(i>>8), byte(i)), keys[0])
			answered(t, served)
		}
		clients := func(pool model.PoolID) (n int) {
			for m, err := range p.Sessions(context.Background(), s) {
				check(t, err)
				if m.Pool == pool {
					n++
				}
			}
			return n
		}
		if n := clients(flooded); n != bound {
			t.Errorf("%d clients of the flooded pool are remembered, want %d", n, bound)
		}
		client := address(false, 10, 100, 0, 1)
		ask(t, client, other)
		answered(t, served)
		session := dataplane.Session{Pool: victim, Client: client}
		if ok, err := session.Find(context.Background(), p, s); err != nil || !ok || clients(victim) != 1 {
			t.Errorf("the client of another pool is not remembered: %v", err)
		}
	})
}

// ask sends a datagram from any address.
func ask(t *testing.T, from netip.Addr, to model.Key) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	check(t, err)
	defer unix.Close(fd)
	check(t, unix.Bind(fd, &unix.SockaddrInet4{Addr: from.As4()}))
	check(t, unix.Sendto(fd, []byte("x"), 0, &unix.SockaddrInet4{Addr: to.Addr.As4(), Port: int(to.Port)}))
}

func answered(t *testing.T, served net.PacketConn) {
	t.Helper()
	check(t, served.SetReadDeadline(time.Now().Add(10*time.Second)))
	_, _, err := served.ReadFrom(make([]byte, 1))
	check(t, err)
}

// boundOf is how many elements a map of IPv4 may have.
func boundOf(t *testing.T, name string) (n int) {
	t.Helper()
	list := runNFT(t, "list map ip fairlead "+name)
	_, text, _ := strings.Cut(list, "size ")
	if _, err := fmt.Sscan(text, &n); err != nil {
		t.Errorf("the map has no size: %v\n%s", err, list)
	}
	return n
}
