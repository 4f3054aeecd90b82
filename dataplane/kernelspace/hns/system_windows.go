package hns

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"unsafe"

	"golang.org/x/sys/windows"
)

// system is the service of this node. The entry points, documents and errors are those of Microsoft's hnslib.
type system struct {
	library, older *windows.LazyDLL
	entries        map[string]*windows.LazyProc
}

// System is the service of this node, whether it runs or not.
func System() (HNS, error) {
	s := &system{
		library: windows.NewLazySystemDLL("computenetwork.dll"), older: windows.NewLazySystemDLL("vmcompute.dll"),
		entries: map[string]*windows.LazyProc{},
	}
	return s, errors.Join(s.library.Load(), s.older.Load())
}

// Kinds of objects, by their names in those of entry points.
const (
	network      = "Network"
	endpoint     = "Endpoint"
	loadBalancer = "LoadBalancer"
)

// Version implements HNS.
func (s *system) Version(ctx context.Context) (v Version, err error) {
	if err := ctx.Err(); err != nil {
		return v, err
	}
	method, path, object, answer := utf16("GET"), utf16("/globals/version"), utf16(""), new(*uint16)
	if err := s.call(s.older, "HNSCall", nil, uintptr(unsafe.Pointer(method)), uintptr(unsafe.Pointer(path)),
		uintptr(unsafe.Pointer(object)), uintptr(unsafe.Pointer(answer))); err != nil {
		return v, err
	}
	said, err := decode[struct {
		Success bool
		Error   string
		Output  Version
	}](take(*answer), nil)
	if err == nil && !said.Success {
		err = fmt.Errorf("HNS does not say its version: %s", said.Error)
	}
	return said.Output, err
}

// Network implements HNS.
func (s *system) Network(ctx context.Context, name string) (Network, error) {
	ids, err := s.enumerate(ctx, network, map[string]string{"Name": name})
	if err == nil && len(ids) == 0 {
		err = ErrNoNetwork
	}
	if err != nil {
		return Network{}, fmt.Errorf("network %q: %w", name, err)
	}
	n, err := decode[Network](s.read(ctx, network, ids[0]))
	n.ID = strings.ToUpper(n.ID)
	return n, err
}

// EndpointIDs implements HNS.
func (s *system) EndpointIDs(ctx context.Context, network string) ([]string, error) {
	return s.enumerate(ctx, endpoint, map[string]string{"VirtualNetwork": network})
}

// Endpoint implements HNS.
func (s *system) Endpoint(ctx context.Context, id string) (Endpoint, error) {
	return endpointOf(s.read(ctx, endpoint, id))
}

// CreateEndpoint implements HNS.
func (s *system) CreateEndpoint(ctx context.Context, e Endpoint) (Endpoint, error) {
	in, err := s.open(ctx, network, e.Network)
	if errors.Is(err, ErrNotFound) {
		return e, fmt.Errorf("%w: %w", ErrNoNetwork, err)
	}
	if err != nil {
		return e, err
	}
	defer s.close(network, in)
	settings, id, made, record := document(e), new(windows.GUID), new(windows.Handle), new(*uint16)
	if err := s.call(s.library, "HcnCreateEndpoint", record, uintptr(in), uintptr(unsafe.Pointer(id)),
		uintptr(unsafe.Pointer(settings)), uintptr(unsafe.Pointer(made)), uintptr(unsafe.Pointer(record))); err != nil {
		return e, err
	}
	defer s.close(endpoint, *made)
	return endpointOf(s.query(endpoint, *made))
}

// DeleteEndpoint implements HNS.
func (s *system) DeleteEndpoint(ctx context.Context, id string) error {
	return s.delete(ctx, endpoint, id)
}

// LoadBalancerIDs implements HNS.
func (s *system) LoadBalancerIDs(ctx context.Context) ([]string, error) {
	return s.enumerate(ctx, loadBalancer, nil)
}

// LoadBalancer implements HNS.
func (s *system) LoadBalancer(ctx context.Context, id string) (LoadBalancer, error) {
	return loadBalancerOf(s.read(ctx, loadBalancer, id))
}

// CreateLoadBalancer implements HNS.
func (s *system) CreateLoadBalancer(ctx context.Context, b LoadBalancer) (LoadBalancer, error) {
	if err := ctx.Err(); err != nil {
		return b, err
	}
	settings, id, made, record := document(b), new(windows.GUID), new(windows.Handle), new(*uint16)
	if err := s.call(s.library, "HcnCreateLoadBalancer", record, uintptr(unsafe.Pointer(id)),
		uintptr(unsafe.Pointer(settings)), uintptr(unsafe.Pointer(made)), uintptr(unsafe.Pointer(record))); err != nil {
		return b, err
	}
	defer s.close(loadBalancer, *made)
	return loadBalancerOf(s.query(loadBalancer, *made))
}

// ModifyLoadBalancer implements HNS.
func (s *system) ModifyLoadBalancer(ctx context.Context, b LoadBalancer) (LoadBalancer, error) {
	handle, err := s.open(ctx, loadBalancer, b.ID)
	if err != nil {
		return b, err
	}
	defer s.close(loadBalancer, handle)
	b.ID = "" // the handle says which one; kube-proxy's documents have none
	settings, record := document(b), new(*uint16)
	if err := s.call(s.library, "HcnModifyLoadBalancer", record, uintptr(handle), uintptr(unsafe.Pointer(settings)),
		uintptr(unsafe.Pointer(record))); err != nil {
		return b, err
	}
	return loadBalancerOf(s.query(loadBalancer, handle))
}

// DeleteLoadBalancer implements HNS.
func (s *system) DeleteLoadBalancer(ctx context.Context, id string) error {
	return s.delete(ctx, loadBalancer, id)
}

// enumerate lists the ids of those objects of which the filter is true.
func (s *system) enumerate(ctx context.Context, kind string, filter map[string]string) ([]string, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	q := query{SchemaVersion: Schema()}
	if filter != nil {
		text, _ := json.Marshal(filter)
		q.Filter = string(text)
	}
	asked, answer, record := document(q), new(*uint16), new(*uint16)
	if err := s.call(s.library, "HcnEnumerate"+kind+"s", record, uintptr(unsafe.Pointer(asked)),
		uintptr(unsafe.Pointer(answer)), uintptr(unsafe.Pointer(record))); err != nil {
		return nil, err
	}
	ids, err := decode[[]string](take(*answer), nil)
	capitals(ids)
	return ids, err
}

// read asks for an object's document.
func (s *system) read(ctx context.Context, kind, id string) (string, error) {
	handle, err := s.open(ctx, kind, id)
	if err != nil {
		return "", err
	}
	defer s.close(kind, handle)
	return s.query(kind, handle)
}

// query has the fields of HNS's queries.
type query struct {
	SchemaVersion SchemaVersion
	Filter        string `json:",omitempty"`
}

func (s *system) query(kind string, handle windows.Handle) (string, error) {
	asked, answer, record := document(query{SchemaVersion: Schema()}), new(*uint16), new(*uint16)
	err := s.call(s.library, "HcnQuery"+kind+"Properties", record, uintptr(handle), uintptr(unsafe.Pointer(asked)),
		uintptr(unsafe.Pointer(answer)), uintptr(unsafe.Pointer(record)))
	return take(*answer), err
}

func (s *system) open(ctx context.Context, kind, id string) (windows.Handle, error) {
	guid, err := identity(ctx, kind, id)
	if err != nil {
		return 0, err
	}
	handle, record := new(windows.Handle), new(*uint16)
	err = s.call(s.library, "HcnOpen"+kind, record, uintptr(unsafe.Pointer(guid)), uintptr(unsafe.Pointer(handle)),
		uintptr(unsafe.Pointer(record)))
	return *handle, gone(err)
}

// close closes a handle. That it fails says nothing about the object.
func (s *system) close(kind string, handle windows.Handle) {
	_ = s.call(s.library, "HcnClose"+kind, nil, uintptr(handle))
}

func (s *system) delete(ctx context.Context, kind, id string) error {
	guid, err := identity(ctx, kind, id)
	if err != nil {
		return err
	}
	record := new(*uint16)
	err = s.call(s.library, "HcnDelete"+kind, record, uintptr(unsafe.Pointer(guid)), uintptr(unsafe.Pointer(record)))
	return gone(err)
}

// call makes a call. The record is what HNS says about a failure.
//
//go:uintptrescapes
func (s *system) call(library *windows.LazyDLL, name string, record **uint16, args ...uintptr) error {
	entry := s.entries[name]
	if entry == nil {
		entry = library.NewProc(name)
		s.entries[name] = entry
	}
	if err := entry.Find(); err != nil {
		return fmt.Errorf("%w: %w", ErrMissing, err)
	}
	result, _, _ := entry.Call(args...)
	said := ""
	if record != nil {
		said = take(*record)
	}
	if int32(result) >= 0 && said == "" {
		return nil
	}
	var r struct{ Error string }
	if json.Unmarshal([]byte(said), &r) == nil && r.Error != "" {
		said = r.Error
	}
	if said != "" {
		said = ": " + said
	}
	return fmt.Errorf("%s: %w%s", name, failure(uint32(result)), said)
}

// failure is the error of an HRESULT. While HNS starts or stops, RPC has several.
func failure(result uint32) error {
	switch result {
	case 0x800706BA, 0x800706BE, 0x800706D9: // RPC_S_SERVER_UNAVAILABLE, RPC_S_CALL_FAILED, EPT_S_NOT_REGISTERED
		return fmt.Errorf("%w: HNS error %#x", ErrNotRunning, result)
	}
	return Error(result)
}

// gone is the error of a call that names one object.
func gone(err error) error {
	if errors.Is(err, ErrNoEndpoint) {
		return fmt.Errorf("%w: %w", ErrNotFound, err)
	}
	return err
}

func identity(ctx context.Context, kind, id string) (*windows.GUID, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	guid, err := windows.GUIDFromString("{" + id + "}")
	if err != nil {
		return nil, fmt.Errorf("%s %q: %w", kind, id, err)
	}
	return &guid, nil
}

func endpointOf(text string, err error) (Endpoint, error) {
	e, err := decode[Endpoint](text, err)
	e.ID, e.Network = strings.ToUpper(e.ID), strings.ToUpper(e.Network)
	return e, err
}

func loadBalancerOf(text string, err error) (LoadBalancer, error) {
	b, err := decode[LoadBalancer](text, err)
	b.ID = strings.ToUpper(b.ID)
	capitals(b.Endpoints)
	return b, err
}

func capitals(ids []string) {
	for i := range ids {
		ids[i] = strings.ToUpper(ids[i])
	}
}

func decode[T any](text string, err error) (v T, _ error) {
	if err != nil {
		return v, err
	}
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		return v, fmt.Errorf("HNS answers %.100q: %w", text, err)
	}
	return v, nil
}

// document is JSON as HNS takes it.
func document(v any) *uint16 {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err) // the types are those of this package
	}
	return utf16(string(text))
}

func utf16(s string) *uint16 {
	u, err := windows.UTF16PtrFromString(s)
	if err != nil {
		panic(err) // JSON has no zeros
	}
	return u
}

// take is a string of HNS's, which it frees. There may be none.
func take(p *uint16) string {
	if p == nil {
		return ""
	}
	defer windows.CoTaskMemFree(unsafe.Pointer(p))
	return windows.UTF16PtrToString(p)
}
