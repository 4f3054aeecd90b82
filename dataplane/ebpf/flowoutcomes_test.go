package ebpf

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/model"
)

// Packets of a flow tell its outcome once. Forged ones, whose sender does not see the flow, tell nothing.
func TestFlow_outcomes(t *testing.T) {
	r := newPacketRun(t, sharedRows)
	p := &Plane{sets: r.tables.sets}
	t.Cleanup(p.told.close)
	told := func(answers bool) string {
		t.Helper()
		var lines []string
		err := p.outcomes(answers, func(o model.Outcome) {
			lines = append(lines, fmt.Sprintf("%s %s %s", o.Protocol, o.To, o.Result))
		})
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(lines, ", ")
	}
	told(true)
	for _, x := range []struct{ name, first, answer, want string }{
		{"answered", "lan udp %s > 203.0.113.1:53", "out udp 10.244.1.11:5353 > %s", "udp 203.0.113.1:53 answered"},
		{"accepted", "lan tcp %s > 203.0.113.1:80 S", "out tcp 10.244.1.11:8080 > %s SA ack=6", "tcp 203.0.113.1:80 answered"},
		{"refused", "lan tcp %s > 203.0.113.1:80 S", "out tcp 10.244.1.11:8080 > %s RA ack=6", "tcp 203.0.113.1:80 refused"},
		{"forged", "lan tcp %s > 203.0.113.1:80 S", "out tcp 10.244.1.11:8080 > %s RA ack=40000000", ""},
		{
			"unreachable", "lan udp %s > 203.0.113.1:53",
			"out icmp 10.244.1.11:0 > 192.0.2.9:0 port-unreachable (udp %s > 10.244.1.11:5353)", "udp 203.0.113.1:53 refused",
		},
	} {
		for n := range 2 {
			client := fmt.Sprintf("192.0.2.9:%d", 4000+len(x.name)*10+n)
			for _, line := range []string{x.first, x.answer, x.answer} {
				r.sent(fmt.Sprintf(line, client))
			}
			if got := told(true); got != x.want {
				t.Errorf("%s: told %q; want %q", x.name, got, x.want)
			}
		}
	}
	for begun, port := (time.Time{}), 6000; time.Since(begun) >= time.Second/4; port++ { // later is not at once
		begun = time.Now()
		line := fmt.Sprintf("lan udp 192.0.2.9:%d > 203.0.113.1:53", port)
		r.sent(line, line)
		if got := told(true); got != "" && time.Since(begun) < time.Second/4 {
			t.Errorf("two at once: told %q", got)
		}
	}
	for _, service := range []string{"tcp %s > 203.0.113.1:80 S", "udp %s > 203.0.113.1:53", "tcp %s > 192.0.2.1:30080 S"} {
		line := "lan " + fmt.Sprintf(service, "192.0.2.9:5000")
		r.sent(line)
		shift(t, r, -1)
		r.sent(line)
		shift(t, r, -1)
		r.sent(line)
		if got := told(true); strings.Count(got, "unanswered") != 1 || strings.Contains(got, ",") {
			t.Errorf("%s: told %q", line, got)
		}
	}
}
