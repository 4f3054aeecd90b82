package main

import (
	"encoding/json"
	"math"
	"strconv"

	"github.com/invopop/jsonschema"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/model"
)

// limit is what values of a field must be.
type limit struct {
	min, max *int64
	pattern  string
	meaning  string // of the pattern, as an error puts it
	enum     []any
	of       *limit // of the items of a list
	nullable bool   // as a duration is only if the Go type has a pointer to it
}

// duration is what time.ParseDuration reads, without a minus.
const duration = `^\+?(0|(([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h))+)$`

const durationMeaning = "must be a duration of at least 0, like 30s, 5m or 2h22m"

func (l limit) apply(s *jsonschema.Schema) {
	if l.pattern != "" {
		s.Pattern = l.pattern
		s.Extras = map[string]any{"patternErrorMessage": l.meaning}
	}
	s.Enum = l.enum
	if l.min != nil {
		s.Minimum = literal(*l.min)
	}
	if l.max != nil {
		s.Maximum = literal(*l.max)
	}
	if l.of != nil {
		l.of.apply(s.Items)
	}
}

func literal(n int64) json.Number { return json.Number(strconv.FormatInt(n, 10)) }

func within(low, high int64) limit { return limit{min: &low, max: &high} }

func words[T ~string](all ...T) limit {
	var l limit
	for _, word := range all {
		l.enum = append(l.enum, string(word))
	}
	return l
}

func kubeProxyLimits() map[string]limit {
	count := within(0, math.MaxInt32)
	bit := within(0, 31)
	return map[string]limit{
		"mode": words("", config.ModeIPTables, config.ModeIPVS, config.ModeNFTables, config.ModeEBPF, config.ModeUserspace,
			config.ModeKernelspace, config.ModeAuto),
		"detectLocalMode": words("", config.LocalClusterCIDR, config.LocalNodeCIDR, config.LocalBridgeInterface,
			config.LocalInterfaceNamePrefix),
		"showHiddenMetricsForVersion":     words("", config.PreviousKubernetes),
		"iptables.masqueradeBit":          bit,
		"nftables.masqueradeBit":          bit,
		"conntrack.maxPerCore":            count,
		"conntrack.min":                   count,
		"conntrack.tcpEstablishedTimeout": {nullable: true},
		"conntrack.tcpCloseWaitTimeout":   {nullable: true},
		"oomScoreAdj":                     within(-1000, 1000),
		"ipvs.scheduler":                  words(append([]string{""}, model.Schedulers()...)...),
		"clientConnection.burst":          count,
		"logging.format":                  words("", "text", "json"),
		"logging.verbosity":               count,
		"logging.vmodule[].verbosity":     count,
		"logging.vmodule[].filePattern":   {pattern: `^[^=,]+$`, meaning: "must be a name without equals sign and comma"},
	}
}

// absolute begins a path, on Windows with a drive.
const absolute = `^(/|[A-Za-z]:[/\\])`

func fairleadLimits() map[string]limit {
	elements := within(0, 1<<24)
	return map[string]limit{
		"manifests":         {of: &limit{pattern: absolute, meaning: "must be an absolute path"}},
		"controlSocket":     {pattern: `^$|` + absolute, meaning: "must be an absolute path, or empty"},
		"counters":          words(config.CountNothing, config.CountServices, config.CountBackends),
		"flowtable":         words(config.FlowtableOff, config.FlowtableAuto, config.FlowtableAlways),
		"backendHealth":     words(config.BackendHealthOff, config.BackendHealthObserve, config.BackendHealthEject),
		"ejection.failures": within(1, 100), "ejection.floorPercent": within(1, 100),

		"takeOver":        words(config.TakeOverRemove, config.TakeOverKeep),
		"iptablesBackend": words(config.IPTablesAsSystem, config.IPTablesLegacy, config.IPTablesNFTables),
		"ipvsAddressMode": words(config.IPVSAddressesByCIDR, config.IPVSAddressesByRoute, config.IPVSAddressesOnDummy),
		"ebpf.cgroupRoot": {pattern: `^(/.*)?$`, meaning: "must be an absolute path, or empty"},
		"ebpf.bpfRoot":    {pattern: `^/`, meaning: "must be an absolute path"},
		"ebpf.packets":    words(config.EBPFPacketsByTC, config.EBPFPacketsByNFTables),
		"ebpf.acceleration": words(
			config.EBPFAccelerationOff, config.EBPFAccelerationBestEffort, config.EBPFAccelerationNative),
		"userspace.redirect": words(config.UserspaceByWhatThereIs, config.UserspaceByTPROXY, config.UserspaceByNAT,
			config.UserspaceByIPTables, config.UserspaceByListening),
		"ebpf.forwarding": words(config.EBPFForwardingSNAT, config.EBPFForwardingDSR),
		"ebpf.sockets":    words(config.EBPFSocketsOfAll, config.EBPFSocketsOfNode),

		"metricsServices": within(0, 10000),

		"ebpf.sizes.affinities":   elements,
		"ebpf.sizes.flows":        elements,
		"ebpf.sizes.sockets":      elements,
		"ebpf.sizes.translations": elements,
		"ebpf.sizes.services":     within(0, 1<<20),

		"userspace.dials":          within(1, 64),
		"userspace.maxConnections": within(0, 1<<20),
		"userspace.maxFlows":       within(0, 1<<20),
	}
}
