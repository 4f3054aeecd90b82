// Package chaos has backends of Services die and come back at random, and the agent too, and holds what clients see
// against a model:
//
//	seed ─► plan ─► faults: deaths, slowness, a partition, late removals, kills of the agent, switches of its mode
//	                  │ each tells the model                      │
//	                  ▼                                           ▼
//	                model ◄── each connection, each session ── clients ─► node, fairlead run --backend-health=eject
//	                  ▲                                           │
//	                  └────── each second: fairlead services ─────┘
//
// Invariants are checked all the time:
//
//   - A connection fails only if a backend of its Service is dead that the Service still has.
//   - A healthy backend is out of use for ten seconds at most, and a dead one is out after ten seconds.
//   - The floor of each Service's ready endpoints stays in use.
//   - A client with a session changes its backend only if the old one was dead or removed.
//   - The agent answers commands, and is ready after each start.
//
// Only mode userspace may break connections, and refuse new ones, while the agent is dead.
//
// ./dev chaos 1h runs it for an hour, ./dev test for some seconds. The same seed gives the same faults.
package chaos
