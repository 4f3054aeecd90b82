package hns_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/dataplane/kernelspace/hns"
	"fairlead.dev/fairlead/lab/hnssim"
	"fairlead.dev/fairlead/lab/wine/fakehns"
)

// serve starts a service with a network, for hns.System.
func serve(t *testing.T) (*hnssim.Service, *fakehns.Server) {
	t.Helper()
	s := hnssim.New(hns.Version{Major: 15, Minor: 5})
	plugin(t, s)
	server, err := fakehns.Start(s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	t.Setenv(fakehns.Variable, server.Address())
	return s, server
}

func system(t *testing.T) hns.HNS {
	t.Helper()
	h, err := hns.System()
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// plugin makes the networks.
func plugin(t *testing.T, s *hnssim.Service) {
	t.Helper()
	for _, n := range []string{
		`{"Name":"nat","Type":"NAT"}`,
		`{"Name":"cbr0","Type":"L2Bridge","Policies":[{"Type":"RemoteSubnetRoute","Settings":{"ProviderAddress":"192.0.2.9"}}]}`,
	} {
		if _, err := s.Do(hnssim.Call{Verb: hnssim.Create, Kind: hnssim.Networks, Document: []byte(n)}); err != nil {
			t.Fatal(err)
		}
	}
}

// part is what a method returns.
type part struct {
	value any
	err   string // which one a caller can tell it from
}

// story uses each method, and says what happened. Each failure is one of those that package kernelspace tells apart.
func story(ctx context.Context, h hns.HNS) (said []part) {
	say := func(v any, err error) { said = append(said, part{v, kindOf(err)}) }
	v, err := h.Version(ctx)
	say(v, err)
	_, err = h.Network(ctx, "none")
	say("no network", err)
	n, err := h.Network(ctx, "cbr0")
	say(n, err)
	one, two := endpoints(ctx, h, n.ID, say)
	balancers(ctx, h, one.ID, two.ID, say)
	say("delete endpoint", h.DeleteEndpoint(ctx, two.ID))
	ids, err := h.EndpointIDs(ctx, n.ID)
	say(ids, err)

	_, err = h.CreateEndpoint(ctx, remote(missing, "10.244.2.5"))
	say("no such network", err)
	ended, end := context.WithCancel(ctx)
	end()
	_, err = h.LoadBalancerIDs(ended)
	say("ended", err)
	return said
}

func endpoints(ctx context.Context, h hns.HNS, network string, say func(any, error)) (one, two hns.Endpoint) {
	one, err := h.CreateEndpoint(ctx, remote(network, "10.244.2.5"))
	say(one, err)
	_, err = h.CreateEndpoint(ctx, remote(network, "10.244.2.5"))
	say("the same again", err)
	two, err = h.CreateEndpoint(ctx, remote(network, "fd00::5"))
	say(two, err)
	ids, err := h.EndpointIDs(ctx, network)
	say(ids, err)
	ids, err = h.EndpointIDs(ctx, missing)
	say(len(ids), err)
	again, err := h.Endpoint(ctx, one.ID)
	say(again, err)
	_, err = h.Endpoint(ctx, missing)
	say("no such endpoint", err)
	say("delete no endpoint", h.DeleteEndpoint(ctx, missing))
	return one, two
}

func remote(network, ip string) hns.Endpoint {
	return hns.Endpoint{
		Network: network, IPConfigurations: []hns.IPConfig{{Address: ip}}, MACAddress: "02-11-0a-f4-02-05", Flags: hns.Remote,
		Policies:      []hns.Policy{{Type: hns.ProviderAddress, Settings: []byte(`{"ProviderAddress":"192.0.2.9"}`)}},
		SchemaVersion: hns.Schema(),
	}
}

func balancers(ctx context.Context, h hns.HNS, one, two string, say func(any, error)) {
	b := hns.LoadBalancer{
		Endpoints: []string{one, two}, FrontendVIPs: []string{"10.96.0.10"}, SourceVIP: "10.244.1.2",
		PortMappings:  []hns.PortMapping{{Protocol: 17, InternalPort: 5353, ExternalPort: 53, DistributionType: hns.SourceIP}},
		SchemaVersion: hns.Schema(), Flags: hns.DSR,
	}
	made, err := h.CreateLoadBalancer(ctx, b)
	say(made, err)
	_, err = h.CreateLoadBalancer(ctx, b)
	say("the same again", err)
	lost := b
	lost.Endpoints, lost.FrontendVIPs = []string{missing}, nil
	_, err = h.CreateLoadBalancer(ctx, lost)
	say("without endpoint", err)
	say("delete what is used", h.DeleteEndpoint(ctx, two))
	b.ID, b.Endpoints = made.ID, b.Endpoints[:1]
	modified, err := h.ModifyLoadBalancer(ctx, b)
	say(modified, err)
	b.ID = missing
	_, err = h.ModifyLoadBalancer(ctx, b)
	say("modify none", err)
	ids, err := h.LoadBalancerIDs(ctx)
	say(ids, err)
	read, err := h.LoadBalancer(ctx, made.ID)
	say(read, err)
	_, err = h.LoadBalancer(ctx, missing)
	say("none", err)
	say("delete", h.DeleteLoadBalancer(ctx, made.ID))
	say("delete again", h.DeleteLoadBalancer(ctx, made.ID))
}

const missing = "00000000-0000-4000-8000-0000000000FF"

// kindOf is what a caller can tell an error from.
func kindOf(err error) string {
	if err == nil {
		return "done"
	}
	for _, known := range []error{
		context.Canceled, hns.ErrNoNetwork, hns.ErrNotFound, hns.ErrNoEndpoint, hns.ErrPortInUse, hns.ErrExists, hns.ErrInUse,
		hns.ErrInvalid, hns.ErrMissing, hns.ErrNotRunning,
	} {
		if errors.Is(err, known) {
			return fmt.Sprintf("%T %v", known, known)
		}
	}
	return "unknown: " + err.Error()
}

// The entry points of the library and the simulator itself do the same.
func TestSystem(t *testing.T) {
	simulator, server := serve(t)
	direct := hnssim.New(simulator.Version())
	plugin(t, direct)
	got, want := story(t.Context(), system(t)), story(t.Context(), hnssim.Client{Service: direct})
	for i := range want {
		if !reflect.DeepEqual(got[i], want[i]) {
			t.Errorf("part %d:\n%+v, want\n%+v", i, got[i], want[i])
		}
	}
	if n := server.Handles(); n != 0 {
		t.Errorf("%d handles are open", n)
	}
	if got, want := simulator.Lines(), direct.Lines(); !slices.Equal(got, want) {
		t.Errorf("left are %q, want %q", got, want)
	}
}

// Each call may fail, with an error that is known or with one that is not. No handle stays open.
func TestSystem_failures(t *testing.T) {
	simulator, server := serve(t)
	for _, failure := range []hns.Error{hns.ErrMissing, hns.ErrNotRunning, hns.ErrPortInUse, 0x80070005} {
		for k, calls := 0, 1; k < calls; k++ {
			simulator.Restart()
			simulator.Fail(nil)
			plugin(t, simulator)
			calls = 0
			simulator.Fail(func(hnssim.Call) error {
				if calls++; calls == k+1 {
					return fmt.Errorf("the simulator fails: %w", failure)
				}
				return nil
			})
			said := story(t.Context(), system(t))
			if !slices.ContainsFunc(said, func(p part) bool { return strings.Contains(p.err, failure.Error()) }) {
				t.Errorf("call %d fails with %v, and no error says so", k, failure)
			}
			if n := server.Handles(); n != 0 {
				t.Fatalf("call %d fails with %v: %d handles are open", k, failure, n)
			}
		}
	}
}

// TestSystem_notRunning has one error for all that RPC says of a service that does not run. The service is found again.
func TestSystem_notRunning(t *testing.T) {
	simulator, server := serve(t)
	h := system(t)
	if _, err := h.LoadBalancerIDs(t.Context()); err != nil {
		t.Fatal(err)
	}
	server.Close()
	for range 2 {
		if _, err := h.LoadBalancerIDs(t.Context()); !errors.Is(err, hns.ErrNotRunning) {
			t.Errorf("while HNS is stopped: %v", err)
		}
	}
	if _, err := h.Version(t.Context()); !errors.Is(err, hns.ErrNotRunning) {
		t.Errorf("the version, while HNS is stopped: %v", err)
	}
	again, err := fakehns.StartAt(simulator, server.Address())
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	for _, code := range []hns.Error{0x800706BA, 0x800706BE, 0x800706D9} {
		simulator.Fail(func(hnssim.Call) error { return code })
		if _, err := h.LoadBalancerIDs(t.Context()); !errors.Is(err, hns.ErrNotRunning) {
			t.Errorf("while RPC is not ready: %v", err)
		}
	}
	simulator.Fail(nil)
	if v, err := h.Version(t.Context()); err != nil || v != simulator.Version() {
		t.Errorf("version %v, %v", v, err)
	}
	os.Unsetenv(fakehns.Variable)
	if _, err := h.Version(t.Context()); !errors.Is(err, hns.ErrNotRunning) {
		t.Errorf("without a service: %v", err)
	}
}
