package handover

import "testing"

// The loop programs both planes where they have objects in common, as it repairs those of the plane in force.
func TestPlane_shares(t *testing.T) {
	nftables, iptables := &Plane{Name: "nftables"}, &Plane{Name: "iptables"}
	ebpf := &Plane{Name: "ebpf", Behind: "nftables"}
	userspace, over := &Plane{Name: "userspace"}, &Plane{Name: "userspace", Over: "iptables"}
	for _, c := range []struct {
		a, b *Plane
		want bool
	}{
		{nftables, iptables, false},
		{nftables, nftables, true},
		{ebpf, nftables, true},
		{ebpf, iptables, false},
		{userspace, iptables, false},
		{over, iptables, true},
		{over, nftables, false},
	} {
		if got, back := c.a.shares(c.b), c.b.shares(c.a); got != c.want || back != c.want {
			t.Errorf("%s, %s: %t, the other way round %t", c.a.Name, c.b.Name, got, back)
		}
	}
}
