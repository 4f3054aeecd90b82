package config

import (
	_ "embed"
	"reflect"
	"strings"
	"time"

	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cliflag "k8s.io/component-base/cli/flag"
	logsapi "k8s.io/component-base/logs/api/v1"
)

// flagTable has the settings under the headings of the help, and in its order: the flag, the field of a file that says
// the same, and what it is for. Several fields are in the order of precedence.
//
//go:embed flags.txt
var flagTable string

// option is a line of flagTable.
type option struct {
	group string
	flag  string // empty: there is none
	field string // empty: there is none
	// always says that the flag counts beside a --config as well, as those of Fairlead's own file do.
	always     bool
	usage      string
	deprecated string
}

// obsolete is the heading of settings that do nothing. They are accepted, so that kube-proxy's command line is.
const obsolete = "accepted, without meaning here"

// allOptions reads flagTable.
func allOptions() (all []option) {
	group := ""
	for line := range strings.Lines(flagTable) {
		switch text := strings.TrimSpace(line); {
		case text == "":
		case strings.HasPrefix(line, "# "):
			group = text[2:]
		case strings.HasPrefix(line, " "):
			o := &all[len(all)-1]
			o.usage = strings.TrimSpace(o.usage + " " + text)
		default:
			words, deprecated, _ := strings.Cut(text, " (deprecated: ")
			o := option{group: group, field: words, deprecated: strings.TrimSuffix(deprecated, ")")}
			if rest, ok := strings.CutPrefix(words, "--"); ok {
				o.flag, o.field, _ = strings.Cut(rest, " ")
			}
			o.always = isOwn(o.field) || strings.HasPrefix(o.field, "logging.") || o.flag == "hostname-override" ||
				o.field == "" && deprecated == ""
			all = append(all, o)
		}
	}
	return all
}

// places are what flags change that have no field, or several, or a syntax of their own.
func (f *Flags) places() map[string]any {
	s, c := &f.said, &f.said.kubeProxy
	l := &c.Logging
	return map[string]any{
		"config": &f.Config, "fairlead-config": &f.FairleadConfig, "write-config-to": &f.WriteConfigTo,
		"cleanup": &f.Cleanup, "init-only": &f.InitOnly, "version": &f.Version, "once": &f.Once, "strict": &f.Strict,
		"master": &f.Master, "log-file": &f.LogFile,
		"hostname-override": &s.hostname, "masquerade-all": &s.masqueradeAll,
		"healthz-port": &s.healthzPort, "metrics-port": &s.metricsPort,
		"iptables-sync-period": &s.iptables.sync, "iptables-min-sync-period": &s.iptables.minSync,
		"ipvs-sync-period": &s.ipvs.sync, "ipvs-min-sync-period": &s.ipvs.minSync,
		"bind-address":              stringValue{reflect.ValueOf(&c.BindAddress).Elem(), "ip", checkIP},
		"healthz-bind-address":      stringValue{reflect.ValueOf(&c.HealthzBindAddress).Elem(), "ipport", checkIPPort},
		"metrics-bind-address":      stringValue{reflect.ValueOf(&c.MetricsBindAddress).Elem(), "ipport", checkIPPort},
		"feature-gates":             cliflag.NewMapStringBool(&c.FeatureGates),
		"v":                         logsapi.VerbosityLevelPflag(&l.Verbosity),
		"vmodule":                   logsapi.VModuleConfigurationPflag(&l.VModule),
		"log-flush-frequency":       &l.FlushFrequency.Duration.Duration,
		"log-text-split-stream":     &l.Options.Text.SplitStream,
		"log-text-info-buffer-size": &l.Options.Text.InfoBufferSize,
		"log-json-split-stream":     &l.Options.JSON.SplitStream,
		"log-json-info-buffer-size": &l.Options.JSON.InfoBufferSize,
	}
}

// bind adds a flag by its name, or one that it had.
func (o *option) bind(s *pflag.FlagSet, name string, place any) {
	switch to := place.(type) {
	case pflag.Value:
		short := ""
		if name == "v" {
			short = name
		}
		s.VarP(to, name, short, o.usage)
	case *string:
		s.StringVar(to, name, *to, o.usage)
	case *[]string:
		if o.field == "manifests" { // whose paths may have commas
			s.StringArrayVar(to, name, *to, o.usage)
		} else {
			s.StringSliceVar(to, name, *to, o.usage)
		}
	case *bool:
		s.BoolVar(to, name, *to, o.usage)
	case *int32:
		s.Int32Var(to, name, *to, o.usage)
	case *float32:
		s.Float32Var(to, name, *to, o.usage)
	case *time.Duration:
		s.DurationVar(to, name, *to, o.usage)
	case *metav1.Duration:
		s.DurationVar(&to.Duration, name, to.Duration, o.usage)
	default: // a word of a type of its own
		v := reflect.ValueOf(to).Elem()
		s.Var(stringValue{v, v.Type().Name(), nil}, name, o.usage)
	}
}

// place points to the field of a file.
func (s *said) place(field string) any {
	v := at(&s.fairlead, field)
	if !v.IsValid() {
		v = at(&s.kubeProxy, field)
	}
	if v.Kind() == reflect.Pointer {
		return v.Interface()
	}
	return v.Addr().Interface()
}
