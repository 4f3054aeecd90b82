package config

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	logsapi "k8s.io/component-base/logs/api/v1"
	kubeproxy "k8s.io/kube-proxy/config/v1alpha1"
	netutils "k8s.io/utils/net"
)

// judge holds the effective configuration against the schemas and against what these cannot say, and
// makes its plane and feature gates known.
func (c *Config) judge(planes []string) (errs field.ErrorList) {
	for kind, value := range map[string]any{KubeProxyKind: c.KubeProxy, FairleadKind: c.Fairlead} {
		for _, v := range effective(kind, value) {
			if judged(c.KubeProxy.Mode, v.Field) {
				errs = append(errs, v.Error)
			}
		}
	}
	errs = append(errs, c.judgeGates()...)
	errs = append(errs, c.judgeMode(planes)...)
	errs = append(errs, judgeAddresses(&c.KubeProxy)...)
	errs = append(errs, judgeNodePorts(c.KubeProxy.NodePortAddresses)...)
	errs = append(errs, judgePods(&c.KubeProxy)...)
	errs = append(errs, judgePeriods(&c.KubeProxy)...)
	errs = append(errs, c.judgeLogging()...)
	errs = append(errs, judgeNodeIPs(c.Fairlead.NodeIPs)...)
	errs = append(errs, judgeSizes(c.Fairlead.EBPF.Sizes)...)
	errs = append(errs, judgeUserspace(&c.Fairlead.Userspace)...)
	errs = append(errs, judgeEjection(&c.Fairlead.Ejection)...)
	if c.Fairlead.AuditInterval.Duration == 0 {
		errs = append(errs, field.Invalid(field.NewPath("auditInterval"), c.Fairlead.AuditInterval, "must be greater than 0"))
	}
	age := c.Fairlead.HealthCheckMaxAge
	if in := age.Duration >= 5*time.Second && age.Duration <= time.Hour; age.Duration != 0 && !in {
		errs = append(errs, field.Invalid(field.NewPath("healthCheckMaxAge"), age, "must be 0, or from 5s to 1h"))
	}
	if age.Duration != 0 && c.Fairlead.ControlSocket == "" {
		errs = append(errs, field.Invalid(field.NewPath("healthCheckMaxAge"), age, "needs a controlSocket, beside its file"))
	}
	slices.SortStableFunc(errs, func(a, b *field.Error) int { return strings.Compare(a.Field, b.Field) })
	return errs
}

// effective are the violations of what has resulted. Paths of manifests may be relative in flags.
func effective(kind string, value any) []violation {
	var document any
	var found []violation
	data, err := json.Marshal(value)
	if err == nil {
		document, err = jsonschema.UnmarshalJSON(bytes.NewReader(data))
	}
	if err == nil {
		found, err = violations(kind, document)
	}
	if err != nil {
		return []violation{{Error: field.InternalError(nil, err)}}
	}
	return slices.DeleteFunc(found, func(v violation) bool {
		return slices.Contains([]string{"manifests", "controlSocket"}, v.at[0])
	})
}

func (c *Config) judgeGates() (errs field.ErrorList) {
	at := field.NewPath("featureGates")
	gates, problems := newGates(c.KubeProxy.FeatureGates)
	c.gates = gates
	for name, problem := range problems {
		errs = append(errs, field.Invalid(at, fmt.Sprintf("%s=%t", name, c.KubeProxy.FeatureGates[name]), problem))
	}
	return errs
}

func (c *Config) judgeMode(planes []string) field.ErrorList {
	at, mode := field.NewPath("mode"), c.KubeProxy.Mode
	if !slices.Contains(modes(), mode) {
		return nil // the schema has said it
	}
	if has, wants := windows(planes), mode == ModeKernelspace; wants && !has {
		return field.ErrorList{field.Invalid(at, mode, "needs Windows")}
	} else if has && !wants {
		return field.ErrorList{field.Invalid(at, mode, "needs Linux; the mode of Windows is kernelspace")}
	}
	if mode == ModeIPVS && !c.Enabled(gateIPVS) {
		return field.ErrorList{field.Invalid(at, mode, "needs the feature gate "+gateIPVS)}
	}
	if c.Plane = planeFor(mode, planes); c.Plane == "" {
		return field.ErrorList{field.Invalid(at, mode, "is not built yet, built are: "+strings.Join(planes, ", "))}
	}
	return nil
}

func judgeAddresses(c *kubeproxy.KubeProxyConfiguration) (errs field.ErrorList) {
	if !parseAddr(c.BindAddress).IsValid() {
		errs = append(errs, field.Invalid(field.NewPath("bindAddress"), c.BindAddress, "must be an IP address"))
	}
	if vip := c.Winkernel.SourceVip; c.Mode == ModeKernelspace && vip != "" && !parseAddr(vip).IsValid() {
		errs = append(errs, field.Invalid(field.NewPath("winkernel", "sourceVip"), vip, "must be an IP address"))
	}
	for name, address := range map[string]string{
		"healthzBindAddress": c.HealthzBindAddress, "metricsBindAddress": c.MetricsBindAddress,
	} {
		if address != "" && parseAddrPort(address).Port() == 0 {
			errs = append(errs, field.Invalid(field.NewPath(name), address,
				"must be an IP address and a port within 1 and 65535, like 0.0.0.0:10256 or [::]:10256"))
		}
	}
	return errs
}

func judgeNodePorts(addresses []string) (errs field.ErrorList) {
	for i, text := range addresses {
		at := field.NewPath("nodePortAddresses").Index(i)
		switch {
		case slices.Contains(nodePortWords(), text):
			if slices.Contains(addresses[:i], text) {
				errs = append(errs, field.Duplicate(at, text))
			}
		case !isCIDR(text):
			errs = append(errs, field.Invalid(at, text, "must be a CIDR or one of "+strings.Join(nodePortWords(), ", ")))
		}
	}
	return errs
}

func isCIDR(text string) bool {
	_, _, err := netutils.ParseCIDRSloppy(text)
	return err == nil
}

// judgePods looks at what the way of telling pods from others uses.
func judgePods(c *kubeproxy.KubeProxyConfiguration) field.ErrorList {
	local := field.NewPath("detectLocal")
	switch c.DetectLocalMode {
	case LocalBridgeInterface:
		return judgeInterface(local.Child("bridgeInterface"), c.DetectLocal.BridgeInterface)
	case LocalInterfaceNamePrefix:
		return judgeInterface(local.Child("interfaceNamePrefix"), c.DetectLocal.InterfaceNamePrefix)
	case LocalClusterCIDR:
		return judgeClusterCIDR(c.ClusterCIDR)
	}
	return nil
}

// maxInterface is the longest name of an interface (IFNAMSIZ of linux/if.h, less its final zero).
const maxInterface = 15

func judgeInterface(at *field.Path, name string) field.ErrorList {
	if n := len(name); n == 0 || n > maxInterface || strings.ContainsAny(name, "*/ \t\n") {
		return field.ErrorList{field.Invalid(at, name, "must be the name of an interface, or its beginning: "+
			"1 to 15 bytes without space, slash and asterisk")}
	}
	return nil
}

func judgeClusterCIDR(text string) (errs field.ErrorList) {
	if text == "" {
		return nil
	}
	at := field.NewPath("clusterCIDR")
	cidrs := strings.Split(text, ",")
	var valid []netip.Prefix
	for _, cidr := range cidrs {
		if prefix, err := netip.ParsePrefix(canonicalCIDR(cidr)); err == nil {
			valid = append(valid, prefix)
			continue
		}
		errs = append(errs, field.Invalid(at, cidr, "must be a CIDR like 10.244.0.0/16, or one of each family and "+
			"only a comma between them"))
	}
	if len(cidrs) > 2 || len(valid) == 2 && valid[0].Addr().Is4() == valid[1].Addr().Is4() {
		errs = append(errs, field.Invalid(at, text, "must be at most one CIDR of each family"))
	}
	return errs
}

func judgePeriods(c *kubeproxy.KubeProxyConfiguration) (errs field.ErrorList) {
	section := field.NewPath("iptables")
	switch c.Mode {
	case ModeIPVS:
		section = field.NewPath("ipvs")
		errs = judgeIPVS(section, &c.IPVS)
	case ModeNFTables:
		section = field.NewPath("nftables")
	case ModeAuto:
		errs = judgeIPVS(field.NewPath("ipvs"), &c.IPVS)
	}
	sync, minSync := modePeriods(c)
	if *sync == 0 {
		errs = append(errs, field.Invalid(section.Child("syncPeriod"), sync.String(), "must be greater than 0"))
	}
	if *minSync > *sync && *sync >= 0 {
		errs = append(errs, field.Invalid(section.Child("syncPeriod"), sync.String(),
			"must not be less than minSyncPeriod, which is "+minSync.String()))
	}
	if c.ConfigSyncPeriod.Duration == 0 {
		errs = append(errs, field.Invalid(field.NewPath("configSyncPeriod"), "0s", "must be greater than 0"))
	}
	return errs
}

// The kernel keeps a timeout of IPVS as seconds, and as ticks, of which there are at most 1000 a second, in an int.
const (
	leastTimeout = time.Second
	mostTimeout  = 596 * time.Hour
)

func judgeIPVS(section *field.Path, c *kubeproxy.KubeProxyIPVSConfiguration) (errs field.ErrorList) {
	for i, text := range c.ExcludeCIDRs {
		if !isCIDR(text) {
			errs = append(errs, field.Invalid(section.Child("excludeCIDRs").Index(i), text, "must be a CIDR"))
		}
	}
	for name, timeout := range map[string]time.Duration{
		"tcpTimeout": c.TCPTimeout.Duration, "tcpFinTimeout": c.TCPFinTimeout.Duration, "udpTimeout": c.UDPTimeout.Duration,
	} {
		if timeout > 0 && timeout < leastTimeout || timeout > mostTimeout {
			errs = append(errs, field.Invalid(section.Child(name), timeout.String(), "must be 0, which leaves it as it is, "+
				"or within 1s and 596h"))
		}
	}
	return errs
}

// judgeLogging looks at what depends on format and feature gates.
func (c *Config) judgeLogging() (errs field.ErrorList) {
	l, at := &c.KubeProxy.Logging, field.NewPath("logging")
	if l.FlushFrequency.Duration.Duration <= 0 {
		errs = append(errs, field.Invalid(at.Child("flushFrequency"), l.FlushFrequency.Duration.Duration.String(),
			"must be greater than 0"))
	}
	if l.Format == logsapi.JSONLogFormat && !c.Enabled(string(logsapi.LoggingBetaOptions)) {
		errs = append(errs, field.Forbidden(at.Child("format"), "json needs the feature gate LoggingBetaOptions"))
	}
	if l.Format == logsapi.JSONLogFormat && len(l.VModule) > 0 {
		errs = append(errs, field.Forbidden(at.Child("vmodule"), "is for format text only"))
	}
	for name, o := range map[string]logsapi.OutputRoutingOptions{
		"text": l.Options.Text.OutputRoutingOptions, "json": l.Options.JSON.OutputRoutingOptions,
	} {
		alpha := c.Enabled(string(logsapi.LoggingAlphaOptions))
		if o.SplitStream && !alpha {
			errs = append(errs, field.Forbidden(at.Child("options", name, "splitStream"),
				"needs the feature gate LoggingAlphaOptions"))
		}
		if o.InfoBufferSize.Value() != 0 && !alpha {
			errs = append(errs, field.Forbidden(at.Child("options", name, "infoBufferSize"),
				"needs the feature gate LoggingAlphaOptions"))
		}
	}
	return errs
}

// leastSize is what a table of the kernel needs that forgets its oldest elements: each processor puts some by.
const leastSize = 4096

func judgeSizes(s EBPFSizes) (errs field.ErrorList) {
	for name, size := range map[string]int32{
		"affinities": s.Affinities, "flows": s.Flows, "sockets": s.Sockets, "translations": s.Translations,
	} {
		if size > 0 && size < leastSize {
			errs = append(errs, field.Invalid(field.NewPath("ebpf", "sizes", name), size,
				fmt.Sprintf("must be 0, which is the default, or at least %d", leastSize)))
		}
	}
	return errs
}

func judgeUserspace(u *Userspace) (errs field.ErrorList) {
	for name, timeout := range map[string]time.Duration{
		"dialTimeout": u.DialTimeout.Duration, "idleTimeout": u.IdleTimeout.Duration,
		"halfClosedTimeout": u.HalfClosedTimeout.Duration, "udpTimeout": u.UDPTimeout.Duration,
		"udpStreamTimeout": u.UDPStreamTimeout.Duration,
	} {
		if timeout == 0 {
			errs = append(errs, field.Invalid(field.NewPath("userspace", name), "0s", "must be greater than 0"))
		}
	}
	return errs
}

func judgeEjection(e *Ejection) (errs field.ErrorList) {
	at := field.NewPath("ejection")
	between := func(name string, d metav1.Duration, least, most time.Duration) {
		if d.Duration < least || d.Duration > most {
			errs = append(errs, field.Invalid(at.Child(name), d, fmt.Sprintf("must be within %s and %s", least, most)))
		}
	}
	between("time", e.Time, time.Second, time.Hour)
	between("maxTime", e.MaxTime, e.Time.Duration, time.Hour)
	between("slowStart", e.SlowStart, 0, 4*time.Minute)
	return errs
}

func judgeNodeIPs(ips []string) (errs field.ErrorList) {
	var before []netip.Addr
	for i, text := range ips {
		ip := parseAddr(text)
		second := slices.ContainsFunc(before, func(o netip.Addr) bool { return o.Is4() == ip.Is4() })
		if !ip.IsValid() || ip.IsUnspecified() || ip.IsMulticast() || second {
			errs = append(errs, field.Invalid(field.NewPath("nodeIPs").Index(i), text,
				"must be an address of this node, one of each family at most"))
		}
		before = append(before, ip)
	}
	return errs
}
