// Package attack holds one property: one tenant cannot hurt another. Each attack of its list (attacks_test.go) is
// carried out on a node of a virtual cluster, against the real program, with each data plane to which it applies.
// Meanwhile a victim in another namespace is watched from outside:
//
//	attacks ─► act ─► manifests, packets, connections ─┐
//	                                                   ▼
//	victim: 100 connections a second, open ones ─► node, fairlead run ◄── looked at: /livez, status, log, memory
//	        changes of its own, timed                  ▲
//	                                                   │ the same machine, another node
//	control: the same changes, no attack ──────────────┘
//
// A cell is an attack on a data plane. It is withstood if the victim has lost nothing, and each of its changes took
// effect within a second. Only datagrams may be lost, in mode userspace, to a flood (overflown). Also, the process took
// at most 64 MiB more, /livez told the truth, and the refused object is named to its owner.
//
// ./dev test tries a tenth of the cells while other tests keep the machine busy. There a change may take ten seconds,
// and memory grow by 96 MiB. With -figures FILE, and the machine for itself, a change may take one second, or five
// times as long as the control's.
//
// The table in docs/security.md is made of the list; go test ./lab/attack -run TestTable -update writes it.
package attack
