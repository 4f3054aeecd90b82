// Package integration runs the program itself against real parts: etcd, kube-apiserver,
// kube-controller-manager and kubectl, with the virtual kubelets of a testbed. Its tests do to a cluster
// what its users and mishaps do, while clients go on connecting, and count what fails.
//
//	kubectl ─► kube-apiserver ─► kube-controller-manager ─► EndpointSlices ─┐
//	                 │                                                      ▼
//	                 └─► Kubelet ─► pods ◄── connections ◄── fairlead, named kube-proxy
//	                                  client pod, node, outside ───┘
//
// FAIRLEAD_TEST_PROXY=kube-proxy has the real kube-proxy take the tests, as a control of the tests
// themselves.
package integration
