package attack

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"k8s.io/apimachinery/pkg/util/intstr"

	"fairlead.dev/fairlead/drain"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// ejecting are the flags for it.
var ejecting = []string{"--backend-health=eject", "--ejection-time=2m"}

// noneEjected finds that all backends of the victim are in use.
func noneEjected(s *stage) (wrong []string) {
	text, err := engine.Ask(s.Context(), s.control, "/services?endpoints=1&namespace="+victim)
	var said engine.Services
	if err = errors.Join(err, json.Unmarshal(text, &said)); err != nil {
		return []string{err.Error()}
	}
	for _, svc := range said.Services {
		for _, p := range svc.Ports {
			for _, e := range p.Endpoints {
				if e.Rule == "ejected" {
					wrong = append(wrong, fmt.Sprintf("%s: %s is ejected: %s", svc.Service, e.At, e.Reason))
				}
			}
		}
	}
	return wrong
}

// feignSilence has clients connect to the victim's Services whose sockets take in nothing, so that their SYNs come again
// and again. Other SYNs are sent by hand, in the name of a pod whose answers take another way. A false ACK follows each,
// which the backend answers with a reset.
func (s *stage) feignSilence() {
	s.during(4*time.Second, 2, func(int) {
		s.unhearing(lurker, ways[0].address(s, 0), 20)
		s.unhearing(testbed.Outside, ways[2].address(s, 2), 20)
		for i, from := range []testbed.Place{lurker, far} {
			src := s.bed.Addr(from, false)
			for j, number := range []int{0, quietNumber} { // which no other client uses now
				first := 20_000 + 5000*i + 2500*j
				s.forgeAt(lurker, 400, func(k int) forged {
					p := forged{protocol: model.TCP, flags: syn, seq: 1000, dst: ways[0].address(s, number)}
					p.src = netip.AddrPortFrom(src, uint16(first+k/2))
					if k%2 == 1 {
						p.flags, p.seq, p.ack = ack, 1001, 12345
					}
					return p
				})
			}
		}
	})
}

// unhearing begins connections that drop all that comes back, and keeps them. The test kernel, which is slower, gets a fifth.
func (s *stage) unhearing(from testbed.Place, to netip.AddrPort, n int) {
	h := s.held()
	if inTestKernel() {
		n /= 5
	}
	err := s.bed.Do(from, func() error {
		for range n {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
			if err != nil {
				return os.NewSyscallError("socket", err)
			}
			h.add(os.NewFile(uintptr(fd), "unhearing"))
			nothing := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K}}
			err = unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &nothing[0]})
			if err != nil {
				return os.NewSyscallError("setsockopt", err)
			}
			err = unix.Connect(fd, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())})
			if err != nil && !errors.Is(err, unix.EINPROGRESS) {
				return os.NewSyscallError("connect", err)
			}
		}
		return nil
	})
	if err != nil {
		s.Error(err)
	}
}

// feignRefusal has a client whose own firewall refuses the backends' answers, once with ICMP and once with resets. Another
// pod sends ICMP errors about connections that have just begun.
func (s *stage) feignRefusal() {
	to, backend := ways[0].address(s, 0), netip.AddrPortFrom(s.bed.Addr("web-2", false), firstTarget)
	for i, how := range []string{"icmp type host-unreachable", "tcp reset"} {
		rule := fmt.Sprintf("table ip own { chain in { type filter hook input priority 0; tcp sport 80 reject with %s; } ; }", how)
		out, err := s.bed.Command(s.Context(), lurker, "nft", "flush ruleset; "+rule).CombinedOutput()
		if err != nil {
			s.Fatalf("%v: %s", err, out)
		}
		s.during(2*time.Second, 20, func(n int) {
			me := netip.AddrPortFrom(s.bed.Addr(lurker, false), uint16(20_000+1000*i+n))
			ctx, cancel := context.WithTimeout(s.Context(), time.Second)
			go func() {
				defer cancel()
				_, _ = s.bed.Probe(ctx, testbed.Probe{From: lurker, To: to, SourcePort: me.Port(), Timeout: 200 * time.Millisecond})
			}()
			quoted := forged{protocol: model.TCP, src: me, dst: backend, flags: syn, seq: 12345}
			s.forgeAt(evil, 100, func(int) forged {
				return forged{protocol: icmp4, kind: [2]byte{3, 1}, src: backend, dst: me, payload: quoted.append(nil)}
			})
		})
	}
}

// failElsewhere makes the victim's backends those of a Service of the attacker. One of its ports is closed there. At the
// other one, which the victim has as well, clients drop all that comes back.
func (s *stage) failElsewhere() {
	one(func(o *offer) {
		o.ports(2)
		o.Spec.Ports[0].TargetPort, o.Spec.Ports[1].TargetPort = intstr.FromInt32(firstTarget), intstr.FromInt32(9)
		o.endpoints = []netip.Addr{s.bed.Addr("web-1", false), s.bed.Addr("web-2", false)}
	})(s)
	at := netip.MustParseAddr("10.96.128.1")
	s.during(4*time.Second, 2, func(int) {
		s.unhearing(lurker, netip.AddrPortFrom(at, 1), 20)
		s.visit(lurker, netip.AddrPortFrom(at, 2), 2)
	})
}

// waitDrained has two endpoints of the attacker's ask, again and again, when no node uses them any more.
func (s *stage) waitDrained() {
	one(func(o *offer) {
		o.Annotations = map[string]string{"fairlead.dev/drain-barrier": "true"}
		o.endpoints = []netip.Addr{s.bed.Addr(evil, false), s.bed.Addr(lurker, false)}
	})(s)
	for _, from := range []testbed.Place{evil, lurker} {
		at := netip.AddrPortFrom(s.bed.Addr(testbed.Node, false), healthz.Port())
		s.hold(from, at, 1000, "GET "+drain.Path+"?timeout=10m HTTP/1.1\r\nHost: a\r\n\r\n")
	}
}
