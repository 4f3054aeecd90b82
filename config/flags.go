package config

import (
	"os"
	"slices"
	"time"

	"github.com/spf13/pflag"
	cliflag "k8s.io/component-base/cli/flag"
	kubeproxy "k8s.io/kube-proxy/config/v1alpha1"

	"fairlead.dev/fairlead/internal/renamed"
)

// Command is what only the command line can say.
type Command struct {
	Config         string // path of the KubeProxyConfiguration; empty: there is none
	FairleadConfig string // path of the FairleadConfiguration; empty: beside Config, if it is there
	WriteConfigTo  string // where to write the effective KubeProxyConfiguration instead of running
	Cleanup        bool   // remove every rule instead of running
	InitOnly       bool   // do what needs root instead of running
	Once           bool   // program the kernel, then exit
	Strict         bool   // serve no manifests in which anything is wrong, or probably a mistake
	Master         string // address of the API server, instead of the one in the kubeconfig
	Version        Version
	LogFile        string // instead of the standard error output
}

// Flags are the options of the command line, and where they come from again when a file has changed.
type Flags struct {
	Command
	Read func(path string) ([]byte, error) // reads a file that is named

	planes  []string
	said    said
	sets    cliflag.NamedFlagSets
	options []option
}

// said is what flags say, in the words of the files where these have them.
type said struct {
	kubeProxy kubeproxy.KubeProxyConfiguration
	fairlead  FairleadConfiguration

	hostname                 string
	healthzPort, metricsPort int32
	masqueradeAll            bool
	iptables, ipvs           periods
}

// periods are flags of their own for the modes iptables and ipvs. The first are those of nftables too.
type periods struct{ sync, minSync time.Duration }

// NewFlags makes the flags with their defaults. The planes are the data planes that are built; the
// first one serves those modes of kube-proxy that are not among them.
func NewFlags(planes ...string) *Flags {
	f := &Flags{Read: os.ReadFile, planes: slices.Clone(planes)}
	setDefaults(&f.said.kubeProxy)
	f.said.kubeProxy.TypeMeta = kubeProxyTypeMeta()
	f.said.fairlead = defaultFairlead()
	f.said.healthzPort, f.said.metricsPort = healthzPort, metricsPort
	f.said.iptables = periods{30 * time.Second, time.Second}
	f.said.ipvs = f.said.iptables
	f.options = slices.DeleteFunc(allOptions(), func(o option) bool { return o.flag == "" })
	places := f.places()
	for _, o := range f.options {
		set := f.sets.FlagSet(o.group)
		set.SortFlags = false
		place, ok := places[o.flag]
		if !ok {
			place = f.said.place(o.field)
		}
		o.bind(set, o.flag, place)
		if o.flag == "version" {
			set.Lookup(o.flag).NoOptDefVal = "true"
		}
		if o.deprecated != "" {
			_ = set.MarkDeprecated(o.flag, o.deprecated) // fails for flags that do not exist
		}
		for _, old := range oldFlags(o.flag) {
			o.bind(set, old, place)
			_ = set.MarkDeprecated(old, "use --"+o.flag)
		}
	}
	return f
}

// AddTo makes a command accept the flags.
func (f *Flags) AddTo(set *pflag.FlagSet) {
	for _, name := range f.sets.Order {
		set.AddFlagSet(f.sets.FlagSets[name])
	}
}

// Lookup is the flag of a name; nil: there is none.
func (f *Flags) Lookup(name string) *pflag.Flag {
	for _, set := range f.sets.FlagSets {
		if flag := set.Lookup(name); flag != nil {
			return flag
		}
	}
	return nil
}

// changed lists the options that were given.
func (f *Flags) changed() (given []option) {
	for _, o := range f.options {
		if f.given(o.flag) {
			given = append(given, o)
		}
	}
	return given
}

// given reports whether a flag was given, by this name or an old one.
func (f *Flags) given(flag string) bool {
	for _, name := range append(oldFlags(flag), flag) {
		if slices.ContainsFunc(f.sets.Order, func(set string) bool { return f.sets.FlagSets[set].Changed(name) }) {
			return true
		}
	}
	return false
}

// oldFlags are the names that a flag had.
func oldFlags(flag string) (old []string) {
	for _, n := range renamed.Of(renamed.Flag) {
		if n.New == flag {
			old = append(old, n.Old)
		}
	}
	return old
}

// kubeProxy is the configuration that the flags of kube-proxy make without a file.
func (f *Flags) kubeProxy() *kubeproxy.KubeProxyConfiguration {
	c := f.said.kubeProxy.DeepCopy()
	if f.WriteConfigTo == "" { // as kube-proxy does
		c.HealthzBindAddress = onPort(c.HealthzBindAddress, f.said.healthzPort)
		c.MetricsBindAddress = onPort(c.MetricsBindAddress, f.said.metricsPort)
	}
	c.IPTables.MasqueradeAll, c.NFTables.MasqueradeAll = f.said.masqueradeAll, f.said.masqueradeAll
	chosen, from := "iptables", f.said.iptables
	if c.Mode == ModeIPVS {
		chosen, from = "ipvs", f.said.ipvs
	}
	at := periods{c.IPTables.SyncPeriod.Duration, c.IPTables.MinSyncPeriod.Duration}
	if f.given(chosen + "-sync-period") {
		at.sync = from.sync
	}
	if f.given(chosen + "-min-sync-period") {
		at.minSync = from.minSync
	}
	sync, minSync := modePeriods(c)
	*sync, *minSync = at.sync, at.minSync
	return c
}

// onPort is what the deprecated flags of ports do: 0 is nowhere, and an address that has a port keeps it.
func onPort(address string, port int32) string {
	if port == 0 {
		return ""
	}
	return withPort(address, int(port))
}

// modePeriods are the fields that say how often the mode synchronises.
func modePeriods(c *kubeproxy.KubeProxyConfiguration) (sync, minSync *time.Duration) {
	switch c.Mode {
	case ModeIPVS:
		return &c.IPVS.SyncPeriod.Duration, &c.IPVS.MinSyncPeriod.Duration
	case ModeNFTables:
		return &c.NFTables.SyncPeriod.Duration, &c.NFTables.MinSyncPeriod.Duration
	default:
		return &c.IPTables.SyncPeriod.Duration, &c.IPTables.MinSyncPeriod.Duration
	}
}
