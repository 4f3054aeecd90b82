// Package sidebyside runs the real kube-proxy and Fairlead side by side and looks for differences.
// All proxies follow the same API server, each on the node of a cluster of its own; the clusters have
// the same address plan, so the same objects fit all of them:
//
//	seed ─► objects ─► kube-apiserver ─┬─► kube-proxy ─► node ◄─┐
//	                                   └─► fairlead   ─► node ◄─┤ the same packets from the same places:
//	                                                            │ same verdicts, backends and sources?
//	docs/differences.md ◄── differences (predicates) ◄── no ────┘
//
// There is one such pair for each mode of kube-proxy; Fairlead is started with the same
// KubeProxyConfiguration. A packet that fares otherwise must be one of the differences that this package
// lists by name. Each of them is as narrow as it can be told, has a case in testdata that shows it, and
// its reason in docs/differences.md. Everything else is a failure of this test.
//
// FAIRLEAD_SEED and FAIRLEAD_SEEDS say which random clusters, and how many.
package sidebyside
