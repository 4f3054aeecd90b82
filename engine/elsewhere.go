//go:build !linux && !windows

package engine

import (
	"errors"
	"net"
	"net/http"
	"net/netip"
	"time"
)

// No agent runs on this system. The plugin of kubectl does, which uses the types of answers.

type door struct{}

func newDoor() door { return door{} }

func (door) admit(h http.Handler) http.Handler { return h }

func (door) listen(string) (net.Listener, error) { return nil, errors.ErrUnsupported }

func knock(string, *http.Request) (*http.Response, error) { return nil, errors.ErrUnsupported }

func listenFree(netip.AddrPort) (net.Listener, error) { return nil, errors.ErrUnsupported }

func listenShared(netip.AddrPort) (net.Listener, error) { return nil, errors.ErrUnsupported }

func processorTime() time.Duration { return 0 }
