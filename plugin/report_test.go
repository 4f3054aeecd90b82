package plugin

import "testing"

func TestAddresses(t *testing.T) {
	a := addresses{}
	for _, c := range [][2]string{
		{"10.0.0.1 to 10.0.0.2:80: no route", "addr-1 to addr-2:80: no route"},
		{"[fd00::1]:80, fd00::1: gone; guard fd00::/64", "[addr-3]:80, addr-3: gone; guard addr-4/64"},
		{"::ffff:10.0.0.1 and fe80::1%eth0", "addr-1 and addr-5%eth0"},
		{"ip-10-0-0-1.internal, node 10-0-0-2", "ip-addr-1.internal, node addr-2"},
		{"127.0.0.1:10256 [::1]:1 0.0.0.0 ::", "127.0.0.1:10256 [::1]:1 0.0.0.0 ::"},
		{`"2026-11-26T09:32:57.123Z" 12:34:56 6.1.0-50 a::b::c`, `"2026-11-26T09:32:57.123Z" 12:34:56 6.1.0-50 a::b::c`},
		{"address:10.0.0.1 key:fd00::1.", "address:addr-1 key:addr-3."},
	} {
		if got := string(a.replace([]byte(c[0]))); got != c[1] {
			t.Errorf("%q becomes %q, want %q", c[0], got, c[1])
		}
	}
}
