package httpserve

import "testing"

func TestSourceOf(t *testing.T) {
	t.Parallel()
	for remote, want := range map[string]string{
		"192.0.2.1:1":                 "192.0.2.1/32",
		"[::ffff:192.0.2.1]:1":        "192.0.2.1/32",
		"127.0.0.1:1":                 "127.0.0.0/8",
		"127.9.9.9:1":                 "127.0.0.0/8",
		"[::1]:1":                     "::/64",
		"[2001:db8:0:1:2:3:4:5]:1":    "2001:db8:0:1::/64",
		"[2001:db8:0:1:ffff::]:65535": "2001:db8:0:1::/64",
		"[2001:db8:0:2::]:1":          "2001:db8:0:2::/64",
		"[fe80::1%eth0]:1":            "fe80::/64",
		"":                            "invalid Prefix",
		"@":                           "invalid Prefix",
	} {
		if got := sourceOf(remote).String(); got != want {
			t.Errorf("%s: %s, want %s", remote, got, want)
		}
	}
}
