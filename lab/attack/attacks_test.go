package attack

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// named is the beginning of the names of what the attacker has.
var named = []string{" " + tenant + "/"}

// ofThisKernel are planes whose agent does not run in the test kernel, where to read so many objects takes ten times as
// long. All planes share the code that reads them.
var ofThisKernel = []plane{nftables, iptables, ebpf, userspace}

// attacks are all. Whatever it says of a number of Services, they are in one namespace.
var attacks = []attack{
	// Objects.
	{
		name: "affinity-timeouts", who: aTenant,
		does:  "2,500 affinity timeouts",
		stops: "timeouts lie on a grid",
		act: many(2500, func(i int, o *offer) {
			o.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
			o.Spec.SessionAffinityConfig = timeout(i + 1)
		}),
	},
	{
		name: "maglev-tables", who: aTenant,
		does:  "400 Services with large tables",
		stops: "equal backends share a table",
		act: many(400, func(i int, o *offer) {
			o.Annotations = map[string]string{"fairlead.dev/scheduler": "mh"}
			o.endpoints = addresses("10.250.0.1", 2*i, 2)
		}),
	},
	{
		name: "weights", who: aTenant,
		does:  "300 ports, weights without common divisor",
		stops: "slots are shared, built in linear time",
		act: one(func(o *offer) {
			o.ports(300)
			o.endpoints, o.weights = addresses("10.250.0.1", 0, 40), primes(40, 256)
		}),
	},
	{
		name: "one-external-address", who: aTenant,
		does:  "3,000 Services claim one address",
		stops: "linear contests; the older has it",
		act:   many(3000, func(_ int, o *offer) { o.Spec.ExternalIPs = []string{"198.51.100.7"} }), told: named,
	},
	{
		name: "ports-addresses", who: aTenant,
		does:  "1,000 ports × 200 addresses",
		stops: "share of entries",
		act:   one(func(o *offer) { o.ports(1000).Spec.ExternalIPs = texts(addresses("198.51.100.1", 0, 200)...) }), told: named,
	},
	{
		name: "ports-ranges", who: aTenant,
		does:  "500 ports × 5,000 source ranges",
		stops: "share of entries",
		act:   one(func(o *offer) { o.ports(500).ranges(5000) }), told: named,
	},
	{
		name: "ports-endpoints", who: aTenant,
		does:  "500 ports × 2,000 endpoints",
		stops: "share of entries",
		act:   one(func(o *offer) { o.ports(500).endpoints = addresses("10.250.0.1", 0, 2000) }), told: named,
	},
	{
		name: "source-ranges", who: aTenant,
		does:  "10,000 source ranges",
		stops: "a tree",
		act:   one(func(o *offer) { o.ranges(10_000) }),
	},
	{
		name: "ports", who: aTenant,
		does:  "20,000 ports",
		stops: "linear time",
		act:   one(func(o *offer) { o.ports(20_000) }),
	},
	{
		name: "all-ports", who: aTenant,
		does:  "65,000 ports",
		stops: "bound of parsing",
		act:   one(func(o *offer) { o.ports(65_000) }), told: []string{"evil.yaml"},
	},
	{
		name: "services", who: aTenant,
		does:  "10,000 Services at once",
		stops: "linear time, in pieces",
		act:   many(10_000, func(_ int, o *offer) { o.light() }),
		look:  fewSeries,
	},
	{
		name: "endpoints", who: aTenant,
		does:  "20,000 endpoints flap",
		stops: "only differences are programmed",
		act: func(s *stage) {
			s.during(2*time.Second, 2, func(n int) {
				one(func(o *offer) { o.endpoints = addresses("10.250.0.1", 10_000*(n%2), 20_000) })(s)
			})
		},
	},
	{
		name: "flapping", who: aTenant,
		does:  "an endpoint flaps 200 times a second",
		stops: "changes are gathered",
		act: func(s *stage) {
			s.during(3*time.Second, 200, func(n int) {
				one(func(o *offer) { o.endpoints = addresses("10.250.0.1", 0, 1+n%2) })(s)
			})
		},
	},
	{
		name: "bad-objects", who: aTenant,
		does:  "5,000 mistakes",
		stops: "bounded log",
		act: many(5000, func(i int, o *offer) {
			o.Spec.Ports[0].Port = 70_000
			o.Spec.Ports[1].Protocol = corev1.Protocol(fmt.Sprint("X", i))
			o.Spec.LoadBalancerSourceRanges = []string{"10.0.0.0/33"}
		}), told: named,
	},
	{
		name: "health-check-ports", who: aTenant,
		does:  "2,700 health check ports",
		stops: "share of listeners",
		act: many(2700, func(i int, o *offer) {
			o.Spec.Type, o.Spec.ExternalTrafficPolicy = corev1.ServiceTypeLoadBalancer, corev1.ServiceExternalTrafficPolicyLocal
			o.Spec.HealthCheckNodePort = int32(34_000 + i)
		}), told: named,
	},
	{
		name: "prefixes", who: aTenant,
		does:  "2,000 prefixes, each a bit longer",
		stops: "trees of bounded depth",
		act: many(16, func(i int, o *offer) {
			for n := range 125 {
				b := [16]byte{0: 0x20, 1: 0x01, 15: byte(i)}
				b[n/8] ^= 0x80 >> (n % 8)
				o.Spec.ExternalIPs = append(o.Spec.ExternalIPs, netip.AddrFrom16(b).String())
			}
		}),
	},

	{
		name: "events", who: aTenant, api: true,
		on:    ofThisKernel,
		does:  "5,000 mistakes in an API server",
		stops: "bounded Events",
		act:   many(5000, func(_ int, o *offer) { o.Spec.Ports[0].Port = 70_000 }),
		told:  named, look: told,
	},
	{
		name: "flapping-api", who: aTenant, api: true,
		does:  "flapping in an API server",
		stops: "changes are gathered",
		act: func(s *stage) {
			s.during(3*time.Second, 200, func(n int) {
				one(func(o *offer) { o.endpoints = addresses("10.250.0.1", 0, 1+n%2) })(s)
			})
		},
	},
	{
		name: "services-api", who: aTenant, api: true,
		on:    ofThisKernel,
		does:  "10,000 Services in an API server",
		stops: "linear time",
		act:   many(10_000, func(_ int, o *offer) { o.light() }),
	},
	{
		name: "slow-server", who: theServer, api: true,
		does:  "nothing but watches is answered",
		stops: "Events wait for themselves",
		act: func(s *stage) {
			s.objects.(*server).slow(30 * time.Second)
			many(100, func(_ int, o *offer) { o.Spec.Ports[0].Port = 70_000 })(s)
		},
		told: named,
	},

	{
		name: "collisions", who: aTenant,
		does:  "1,000 addresses of one hash",
		stops: "tables compare whole addresses",
		act:   one(func(o *offer) { o.Spec.ExternalIPs = collisions(1000) }),
	},

	// Attacks on the property of others.
	{
		name: "steal-cluster-ip", who: aTenant,
		does:  "another's ClusterIP, and that of DNS",
		stops: "precedence",
		act: one(func(o *offer) {
			o.older()
			o.Spec.ExternalIPs = texts(append(both("10.96.1.1"), both(dnsIP)...)...)
		}),
		told: named, look: answers(dnsIP, "web-"),
	},
	{
		name: "steal-in-advance", who: aTenant,
		does:  "ClusterIPs before they are given out",
		stops: "precedence",
		act: one(func(o *offer) {
			o.older()
			o.Spec.ExternalIPs = append(numbered(addedNumber).Spec.ClusterIPs, numbered(swapNumber).Spec.ClusterIPs...)
		}),
		told: named,
	},
	{
		name: "steal-node-port", who: aTenant,
		does:  "another's NodePort, ports of the node",
		stops: "precedence",
		act: func(s *stage) {
			node := texts(s.bed.Addr(testbed.Node, false), s.bed.Addr(testbed.Node, true))
			many(3, func(i int, o *offer) {
				switch i {
				case 0:
					exposed(o.Service, firstNodePort+2)
				case 1:
					o.older()
					o.Spec.ExternalIPs = node
					o.Spec.Ports[0].Port, o.Spec.Ports[1].Port = firstNodePort+2, firstNodePort+quietNumber
				default:
					o.older()
					o.Spec.ExternalIPs = node
					exposed(o.Service, int32(healthz.Port()))
					o.Spec.Ports[0].Port, o.Spec.Ports[1].NodePort = int32(healthz.Port()), int32(metrics.Port())
				}
			})(s)
		},
		told: named,
	},
	{
		name: "node-address", who: aTenant,
		does:  "ClusterIPs of node and pod",
		stops: "precedence",
		act: func(s *stage) {
			many(2, func(i int, o *offer) {
				o.older()
				o.at(s.bed.Addr([]testbed.Place{testbed.Node, "web-2"}[i], false), s.bed.Addr([]testbed.Place{testbed.Node, "web-2"}[i], true))
			})(s)
		},
		told: named,
	},
	{
		name: "metadata-address", who: aTenant,
		does:  "169.254.169.254, loopback, multicast",
		stops: "refused",
		act: one(func(o *offer) {
			o.Spec.ExternalIPs = []string{"169.254.169.254", "127.0.0.1", "224.0.0.1", "0.0.0.0", "255.255.255.255", "::1", "ff02::1", "fe80::1"}
		}),
		told: named, look: silent("169.254.169.254"),
	},
	{
		name: "endpoint-loop", who: aTenant,
		does:  "an endpoint that is its own NodePort",
		stops: "the loop is recognised",
		act: func(s *stage) {
			node := s.bed.Addr(testbed.Node, false)
			one(func(o *offer) {
				exposed(o.Service, 31777)
				for i := range o.Spec.Ports {
					o.Spec.Ports[i].TargetPort.IntVal = 31777
				}
				o.endpoints = []netip.Addr{node}
			})(s)
			s.visit(testbed.Outside, netip.AddrPortFrom(node, 31777), 20)
		},
	},
	{
		name: "endpoints-not-to-be-believed", who: aTenant,
		does:  "endpoints as 127.0.0.1, ::ffff:a.b.c.d, 010.0.0.1",
		stops: "validated as by Kubernetes",
		act: many(9, func(i int, o *offer) {
			o.written = []string{"127.0.0.1", "169.254.169.254", "224.0.0.1", "0.0.0.0", "::ffff:10.244.1.2", "10.244.001.002",
				"::1", "fe80::1", "ff02::1"}[i]
		}),
		told: named,
	},
	{
		name: "foreign-slices", who: aTenant,
		does:  "slices that say to be another's",
		stops: "namespaces",
		act: many(3, func(i int, o *offer) {
			o.owner = []string{"web-0", "victim/web-0", "../victim/web-0"}[i]
		}),
	},
	{
		name: "names", who: aTenant,
		does:  "quotes, newlines, NUL, 10 kB",
		stops: "never in a rule; quoted in logs",
		act: many(8, func(i int, o *offer) {
			word := []string{`a"b'c`, "a\nlevel=ERROR msg=forged", "a\x00b", strings.Repeat("a", 10_000), "a; drop", "$(reboot)", "\x1b[2J", "a b\tc"}[i]
			o.Name, o.Annotations = word, map[string]string{word: word, "fairlead.dev/scheduler": word}
			o.Spec.Ports[0].Name = word
			o.Spec.SessionAffinity = corev1.ServiceAffinity(word)
		}),
		look: listable,
	},
	{
		name: "timestamps", who: aTenant,
		does:  "objects and files of years 1, 9999",
		stops: "nothing depends on clocks",
		act:   ages,
	},

	// Texts.
	{
		name: "dense-yaml", who: aTenant,
		does:  "4 MB of values",
		stops: "bound of parsing",
		act:   text(func() string { return strings.Repeat("[{},{},{},{},{},{},{},{}]: [a,b,c,d,e,f,g]\n", 90_000) }),
		told:  []string{"evil.yaml"},
	},
	{
		name: "documents", who: aTenant,
		does:  "a million documents",
		stops: "bound of parsing",
		act:   text(func() string { return strings.Repeat("---\n", 1_000_000) }),
	},
	{
		name: "aliases", who: aTenant,
		does:  "10,000 aliases of 100 kB",
		stops: "bound of growth",
		act: text(func() string {
			return "a: &a " + strings.Repeat("x", 100_000) + "\nb: [" + strings.Repeat("*a,", 10_000) + "]\n"
		}),
		told: []string{"evil.yaml"},
	},
	{
		name: "yaml-bomb", who: aTenant,
		does:  "aliases of aliases; depth 100,000",
		stops: "bounds of growth and depth",
		act: text(func() string {
			bomb := "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n"
			for i := range 12 {
				bomb += fmt.Sprintf("a%d: &a%d [%s]\n", i+1, i+1, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*a%d,", i), 10), ","))
			}
			return bomb + "---\n" + strings.Repeat("[", 100_000) + strings.Repeat("]", 100_000) + "\n"
		}),
		told: []string{"evil.yaml"},
	},
	{
		name: "rewritten-file", who: aTenant,
		does:  "written without pause",
		stops: "a file waits for itself",
		act:   rewrite,
	},
	{
		name: "files", who: aTenant,
		does:  "pipes, devices, links, sparse files",
		stops: "regular files only",
		act:   strangeFiles,
	},
	{
		name: "many-files", who: aTenant,
		on:    ofThisKernel,
		does:  "5,000 manifests",
		stops: "only what changed is read",
		act:   manyFiles,
	},

	// Packets.
	{
		name: "syn-flood", who: aClient,
		does:  "300,000 forged SYNs",
		stops: "unanswered flows are apart",
		act: func(s *stage) {
			s.forge(300_000, func(n int) forged {
				return forged{protocol: model.TCP, src: sender(n, s.base(n)), dst: s.base(n), flags: syn, seq: uint32(n)}
			})
		},
	},
	{
		name: "udp-flood", who: aClient,
		does:  "300,000 forged datagrams",
		stops: "unanswered flows are apart",
		act: func(s *stage) {
			s.forge(300_000, func(n int) forged {
				return forged{protocol: model.UDP, src: sender(n, s.base(n)), dst: s.base(n), payload: []byte("?\n")}
			})
		},
	},
	{
		name: "udp-one-source", who: aClient,
		does:  "300,000 datagrams of one client",
		stops: "shares of flows",
		act: func(s *stage) {
			from := netip.AddrPortFrom(s.bed.Addr(testbed.Outside, false), 4000)
			s.forge(300_000, func(int) forged {
				return forged{protocol: model.UDP, src: from, dst: s.base(0), payload: []byte("?\n")}
			})
		},
	},
	{
		name: "sessions", who: aClient,
		does:  "90,000 answered clients with sessions",
		stops: "shares of sessions",
		flags: []string{"--ebpf-size-affinities=8192"},
		act: func(s *stage) {
			for range 3 { // many of the first datagrams are lost, and so are answers
				s.forge(30_000, func(n int) forged {
					return forged{protocol: model.UDP, src: sender(n, s.base(n)), dst: s.base(n), payload: []byte("?\n")}
				})
			}
		},
		look: usedUp,
	},
	{
		name: "hidden-clients", who: aClient,
		does:  "140,000 flows, two endpoints",
		stops: "ports are for each backend",
		act: func(s *stage) {
			s.forge(140_000, func(n int) forged {
				return forged{protocol: model.UDP, src: sender(n, s.base(0)), dst: s.base(0), payload: []byte("?\n")}
			})
		},
	},
	{
		name: "unserved-flood", who: aClient,
		does:  "200,000 packets nobody serves",
		stops: "refused without state",
		act: func(s *stage) {
			to := []netip.AddrPort{
				netip.AddrPortFrom(s.bed.Addr(testbed.Node, false), 31999), netip.MustParseAddrPort("10.96.9.9:80"),
				netip.MustParseAddrPort(baseBalancer + ":81"), netip.AddrPortFrom(s.bed.Addr(testbed.Node, true), 31999),
			}
			s.forge(200_000, func(n int) forged {
				return forged{protocol: either(n / 8), src: sender(n, to[n%4]), dst: to[n%4], flags: syn}
			})
		},
	},
	{
		name: "tracked-flows", who: aClient,
		does:  "300,000 flows past Services",
		stops: "the kernel drops unanswered ones",
		act: func(s *stage) {
			to := netip.AddrPortFrom(s.bed.Addr(lurker, false), 9)
			s.forge(300_000, func(n int) forged { return forged{protocol: model.UDP, src: sender(n, to), dst: to} })
		},
	},
	{
		name: "forged-syn", who: aClient,
		does:  "SYNs at hidden ports",
		stops: "an open connection does not yield",
		act:   func(s *stage) { s.toHidden(forged{flags: syn}) },
	},
	{
		name: "forged-rst", who: aClient,
		does:  "resets at hidden ports",
		stops: "ends compare sequence numbers",
		act: func(s *stage) {
			s.toHidden(forged{flags: fin | ack, seq: 12345, ack: 54321})
			s.toHidden(forged{flags: rst, seq: 12345})
			if s.on == ipvs {
				time.Sleep(11 * time.Second) //nolint:forbidigo // IPVS forgets in ten what a reset has ended, unseen
			}
		},
	},
	{
		name: "forged-icmp", who: aClient,
		does:  "errors about hidden ports",
		stops: "errors end nothing",
		act:   (*stage).aboutHidden,
	},
	{
		name: "fragments", who: aClient,
		does:  "100,000 first fragments",
		stops: "the kernel's bound",
		act: func(s *stage) {
			s.forge(100_000, func(n int) forged {
				return forged{protocol: model.UDP, src: sender(n, s.base(0)), dst: s.base(0), more: 0x2000, payload: make([]byte, 24)}
			})
		},
	},
	{
		name: "martians", who: aClient,
		does:  "sources that are the node's own",
		stops: "no reverse path",
		act: func(s *stage) {
			to := s.base(0)
			from := []netip.AddrPort{to, netip.AddrPortFrom(to.Addr(), 80), netip.MustParseAddrPort("127.0.0.1:80"),
				netip.MustParseAddrPort("10.96.1.1:80"), netip.MustParseAddrPort("224.0.0.1:80"), netip.MustParseAddrPort("0.0.0.0:0")}
			s.forge(60_000, func(n int) forged {
				return forged{protocol: either(n), src: from[n/2%len(from)], dst: to, flags: syn}
			})
		},
	},
	{
		name: "route-localnet", who: aClient,
		does:  "packets to 127.0.0.1",
		stops: "guarded",
		flags: []string{"--nodeport-addresses=primary,localhost"},
		act: func(s *stage) {
			to := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), hostPort)
			from := netip.AddrPortFrom(s.bed.Addr(testbed.Outside, false), 4001)
			s.forge(1000, func(int) forged {
				return forged{protocol: model.UDP, src: from, dst: to, payload: []byte("?\n")}
			})
		},
	},

	// Ejection of backends that are healthy. An ejection would last until it is looked for.
	{
		name: "feigned-silence", who: aPod,
		does:  "clients that drop all answers, false SYNs and ACKs",
		stops: "answers to others count",
		flags: ejecting, act: (*stage).feignSilence, look: noneEjected,
	},
	{
		name: "feigned-refusal", who: aPod,
		does:  "resets and ICMP errors of its own",
		stops: "only the backend's side counts",
		flags: ejecting, act: (*stage).feignRefusal, look: noneEjected,
	},
	{
		name: "failing-endpoint", who: aTenant,
		does:  "another's backends as its own, which fail",
		stops: "each Service judges for itself",
		flags: ejecting, act: (*stage).failElsewhere, look: noneEjected,
	},

	// Connections.
	{
		name: "held-connections", who: aClient,
		does:  "6,000 open connections",
		stops: "shares of files",
		act:   func(s *stage) { s.hold(far, s.base(0), 6000, "") },
	},
	{
		name: "slow-health-checks", who: aClient,
		does:  "a byte now and then",
		stops: "time and connections bounded",
		act: func(s *stage) {
			for _, from := range []testbed.Place{stranger, far, evil, lurker, testbed.Outside} {
				s.hold(from, netip.AddrPortFrom(s.bed.Addr(testbed.Node, false), healthz.Port()), 1000, "GET /livez HTTP/1.1\r\nHost: a\r\nA: ")
			}
		},
	},
	{
		name: "drain-waits", who: aPod, on: []plane{nftables}, // no data plane has a part in it
		does:  "2,000 requests that wait at /drained",
		stops: "two for each address",
		act:   (*stage).waitDrained,
	},
	{
		name: "sockets", who: aPod,
		does:  "8,000 sockets of a pod",
		stops: "shares of flows",
		act:   func(s *stage) { s.sockets(lurker, 8000) },
	},
	{
		name: "metrics-connections", who: aUser,
		does:  "5,000 connections",
		stops: "time and connections bounded",
		act:   func(s *stage) { s.hold(testbed.Node, metrics, 5000, "GET /metrics HTTP/1.1\r\n") },
	},
	{
		name: "localhost-node-ports", who: aUser,
		does:  "12,000 connections and flows",
		stops: "shares of files",
		flags: []string{"--nodeport-addresses=primary,localhost"},
		act: func(s *stage) {
			for _, to := range []string{"127.0.0.1", "::1"} {
				at := netip.AddrPortFrom(netip.MustParseAddr(to), baseNodePort)
				s.hold(testbed.Node, at, 3000, "")
				s.flows(testbed.Node, at, 3000)
			}
		},
	},
	{
		name: "control-socket", who: aUser,
		does:  "orders; 1,000 connections",
		stops: "mode 0600",
		act:   (*stage).orderAround,
	},
	{
		name: "second-proxy", who: anOperator,
		does:  "another Fairlead",
		stops: "ends, names the first",
		act:   (*stage).second,
	},
	{
		name: "rules-of-others", who: anOperator,
		does:  "other rules change 50 times a second",
		stops: "audits have a budget",
		act:   (*stage).churn,
	},
}
