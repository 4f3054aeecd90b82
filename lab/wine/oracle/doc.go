// Package oracle compares mode kernelspace with kube-proxy's: both get the objects of random clusters, and each makes
// objects of HNS on a simulator of its own. It runs in Wine.
//
//	objects ─┬─► winkernel.NewProxier ─► hnslib ─► computenetwork.dll ─► fakehns ─► hnssim ─┐
//	         └─► service.Table ─► kernelspace ────────────────────────────────────► hnssim ─┴─► lines, compared
//
// Each difference must be of a kind that differences.txt explains.
package oracle
