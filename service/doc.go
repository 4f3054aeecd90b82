// Package service turns Kubernetes objects into rows. All that Kubernetes says about Services ends
// here: types, traffic policies, topology, terminating endpoints, affinity, source ranges, IP modes.
// Below there are only addresses, pools and verdicts.
//
//	corev1.Service, EndpointSlice, Endpoints, Node, ServiceCIDR
//	     │  From…: validate, keep the little that matters, name every Problem
//	     ▼
//	   Batch ──► Table.Update ──► *model.State, model.Change
//	               │      ▲
//	               ▼      │ rows; two Services that claim one address: the older one gets it
//	             Compile: one Service, its Slices, a View of the node
//	               ├─ address.go    at which addresses and ports is it reached?
//	               └─ endpoints.go  which endpoints serve there, and why not the others?
//	                      │
//	                      └──► Table.Explain: the same answers for one packet, in words
//
// Compile is pure: no clock, no kernel, no log, and nothing but its arguments. The Table keeps what
// connects Services with each other: contested addresses, endpoints that are Service addresses, and
// which Services a change touches. The behaviour is that of kube-proxy 1.37 (pkg/proxy of
// kubernetes/kubernetes) where its modes agree; where they do not, the code says which way it goes.
package service
