// Package wine tests the program for Windows as a process, on Linux: in Wine, with a fake HNS beside it.
//
//	./dev wine, ./dev test ─► build ─► a directory of Wine with the libraries of dll ─► exec: go test -exec
//	                                             │ a copy for each run                   (tests that run in Wine)
//	                                             ▼
//	this package ─► fairlead.exe ─► computenetwork.dll ─TCP─► fakehns.Server ─► hnssim.Service ◄─ this package
//
// Wine 8 lacks what dll/bcryptprimitives.c has. It has no AF_UNIX, and its named pipes hang; TCP on the loopback
// interface works.
package wine
