package addrs

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/windows"
)

// errInterrupted is for Linux: Windows gives a list that is whole.
var errInterrupted = errors.New("the addresses changed while they were listed")

// kernel is Windows, as it tells addresses.
type kernel struct {
	updates chan struct{} // has a token when something has changed
}

// listeners are those of all Sources. Windows is asked once: callbacks are few, and none is ever given back.
//
//nolint:gochecknoglobals // the callback has no other way to them
var listeners struct {
	sync.Mutex
	asked bool
	all   map[chan struct{}]bool
}

// New watches the machine.
func New() (*Source, error) {
	s := &Source{due: time.Now()}
	return s, s.subscribe()
}

func (k *kernel) subscribe() error {
	listeners.Lock()
	defer listeners.Unlock()
	if !listeners.asked {
		var handle windows.Handle
		err := windows.NotifyUnicastIpAddressChange(windows.AF_UNSPEC, windows.NewCallback(changed), nil, false, &handle)
		if err != nil {
			return fmt.Errorf("node addresses: subscribe: %w", err)
		}
		listeners.asked, listeners.all = true, map[chan struct{}]bool{}
	}
	k.updates = make(chan struct{}, 1)
	listeners.all[k.updates] = true
	return nil
}

// changed is called by Windows, on a thread of its own.
func changed(_, _, _ uintptr) uintptr {
	listeners.Lock()
	defer listeners.Unlock()
	for l := range listeners.all {
		select {
		case l <- struct{}{}:
		default:
		}
	}
	return 0
}

func (k *kernel) unsubscribe() {
	listeners.Lock()
	defer listeners.Unlock()
	delete(listeners.all, k.updates)
	k.updates = nil
}

// Close ends the watching.
func (k *kernel) Close() error {
	k.unsubscribe()
	return nil
}

// list asks for all addresses of interfaces that are up.
func (k *kernel) list() ([]netip.Addr, error) {
	interfaces, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	addrs := []netip.Addr{}
	for _, i := range interfaces {
		list, err := i.Addrs()
		if err != nil || i.Flags&net.FlagUp == 0 {
			continue // it has gone meanwhile, or is of no use
		}
		for _, a := range list {
			network, ok := a.(*net.IPNet)
			if !ok {
				continue
			}
			addr, _ := netip.AddrFromSlice(network.IP)
			if addr = addr.Unmap(); addr.IsValid() && !slices.Contains(addrs, addr) {
				addrs = append(addrs, addr)
			}
		}
	}
	return addrs, nil
}
