package model

import (
	"encoding/json"
	"maps"
	"net/netip"
	"slices"
)

// MarshalJSON writes the rows as one list for each kind, sorted. The words are those of the text form.
func (s *State) MarshalJSON() ([]byte, error) {
	type frontend struct {
		Address  string         `json:"address"` // address:port
		Protocol string         `json:"protocol"`
		Scope    string         `json:"scope"`
		Service  string         `json:"service"`
		Verdict  string         `json:"verdict"`
		Pool     string         `json:"pool,omitempty"`
		SNAT     string         `json:"snat,omitempty"`
		Hooked   bool           `json:"hooked,omitempty"`
		Allow    []netip.Prefix `json:"allow,omitzero"`
	}
	type backend struct {
		Address string `json:"address"`
		Local   bool   `json:"local"`
		Weight  uint16 `json:"weight"` // 0: draining
	}
	type pool struct {
		Name            string    `json:"name"`
		AffinitySeconds float64   `json:"affinitySeconds,omitempty"`
		Scheduler       string    `json:"scheduler,omitempty"`
		Rebalance       float64   `json:"rebalanceSeconds,omitempty"`
		Backends        []backend `json:"backends"`
	}
	type guard struct {
		Prefix  netip.Prefix `json:"prefix"`
		Verdict string       `json:"verdict"`
	}
	type health struct {
		Address string `json:"address"`
		Service string `json:"service"`
		Local   int    `json:"local"`
	}
	out := struct {
		Frontends []frontend `json:"frontends"`
		Pools     []pool     `json:"pools"`
		Guards    []guard    `json:"guards"`
		Health    []health   `json:"health"`
		Pods      struct {
			Prefixes   []netip.Prefix `json:"prefixes,omitempty"`
			Interfaces []string       `json:"interfaces,omitempty"`
		} `json:"pods"`
	}{Frontends: []frontend{}, Pools: []pool{}, Guards: []guard{}, Health: []health{}}
	for _, k := range slices.SortedFunc(maps.Keys(s.Frontends), Key.Compare) {
		f := s.Frontends[k]
		row := frontend{
			Address: k.AddrPort().String(), Protocol: k.Protocol.String(), Scope: k.Scope.String(),
			Service: f.Service, Verdict: f.Verdict.String(), Hooked: f.Hooked, Allow: f.Allow,
		}
		if f.Verdict == Forward {
			row.Pool, row.SNAT = f.Pool.String(), f.SNAT.String()
		}
		out.Frontends = append(out.Frontends, row)
	}
	for _, id := range slices.SortedFunc(maps.Keys(s.Pools), PoolID.Compare) {
		p := s.Pools[id]
		row := pool{Name: id.String(), AffinitySeconds: p.Affinity.Seconds(), Scheduler: p.Scheduler,
			Rebalance: p.Rebalance.Seconds()}
		for _, b := range p.Backends {
			row.Backends = append(row.Backends, backend{b.AddrPort().String(), b.Local, b.Weight})
		}
		out.Pools = append(out.Pools, row)
	}
	for _, p := range slices.SortedFunc(maps.Keys(s.Guards), netip.Prefix.Compare) {
		out.Guards = append(out.Guards, guard{p, s.Guards[p].String()})
	}
	for _, a := range slices.SortedFunc(maps.Keys(s.Health), netip.AddrPort.Compare) {
		out.Health = append(out.Health, health{a.String(), s.Health[a].Service, s.Health[a].Local})
	}
	out.Pods.Prefixes, out.Pods.Interfaces = s.Pods.Prefixes, s.Pods.Interfaces
	return json.Marshal(out)
}
