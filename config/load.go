package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	logsapi "k8s.io/component-base/logs/api/v1"
	kubeproxy "k8s.io/kube-proxy/config/v1alpha1"

	"fairlead.dev/fairlead/internal/defect"
)

// KubeProxyKind is the kind of kube-proxy's file.
const KubeProxyKind = "KubeProxyConfiguration"

// The release whose kube-proxy this package follows, and the one before it.
const (
	Kubernetes         = "1.37"
	PreviousKubernetes = "1.36"
)

func kubeProxyTypeMeta() metav1.TypeMeta {
	return metav1.TypeMeta{Kind: KubeProxyKind, APIVersion: kubeproxy.SchemeGroupVersion.String()}
}

// Load reads the files that the flags name, and says what is to be done. The error has one line for
// each thing that is wrong.
//
// With --config, flags that have a field in that file are ignored, but for --hostname-override and
// those of logging. That is how kube-proxy does it. Flags that have a field in Fairlead's own file go
// before it.
func (f *Flags) Load() (*Config, error) {
	l := loading{flags: f, config: &Config{Master: f.Master}}
	l.kubeProxy()
	l.fairlead()
	if l.fatal != nil {
		return nil, errors.Join(append(l.errs, l.fatal)...)
	}
	l.ownMode()
	l.config.ModeUnset = l.config.KubeProxy.Mode == ""
	setModeDefaults(&l.config.KubeProxy)
	fold(&l.config.KubeProxy)
	l.judge()
	if len(l.errs) > 0 && !defect.Is(defect.ConfigRules) {
		slices.SortStableFunc(l.errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
		return nil, errors.Join(l.errs...)
	}
	l.config.Warnings = append(l.config.Warnings, l.config.meaningless()...)
	return l.config, nil
}

// loading is one run of Load.
type loading struct {
	flags  *Flags
	config *Config
	errs   []error
	fatal  error // what leaves nothing to judge
}

func (l *loading) warn(format string, args ...any) {
	l.config.Warnings = append(l.config.Warnings, fmt.Sprintf(format, args...))
}

// kubeProxy fills in kube-proxy's part: the file's, or else what flags say.
func (l *loading) kubeProxy() {
	f, c := l.flags, &l.config.KubeProxy
	if f.Config == "" {
		*c = *f.kubeProxy()
	} else if doc := l.read(f.Config, KubeProxyKind, kubeproxy.SchemeGroupVersion.String()); doc != nil {
		unknown, errs, err := doc.into(KubeProxyKind, c)
		l.fail(f.Config, err)
		l.refuse(f.Config, errs)
		for _, p := range doc.problems {
			l.warn("%s: %s", f.Config, p.Detail)
		}
		if len(unknown) > 0 {
			l.warn("%s: ignored, as there are no such fields: %s", f.Config, strings.Join(unknown, ", "))
		}
		setDefaults(c)
		l.ignoreFlags()
		f.logsInto(&c.Logging)
	}
	if name := f.said.hostname; name != "" {
		c.HostnameOverride = strings.ToLower(strings.TrimSpace(name))
		if c.HostnameOverride == "" {
			l.errs = append(l.errs, fmt.Errorf("--hostname-override: %q: must not be blank", name))
		}
	}
}

// ignoreFlags says which flags the file outdoes.
func (l *loading) ignoreFlags() {
	var ignored []string
	for _, o := range l.flags.changed() {
		if !o.always {
			ignored = append(ignored, "--"+o.flag)
		}
	}
	if len(ignored) > 0 {
		l.warn("ignored, as --config is given: %s", strings.Join(ignored, ", "))
	}
}

// logsInto lets the flags of logging go before the file. Both lists of vmodule count.
func (f *Flags) logsInto(to *logsapi.LoggingConfiguration) {
	from := f.said.kubeProxy.Logging.DeepCopy()
	if f.given("v") {
		to.Verbosity = from.Verbosity
	}
	if f.given("logging-format") {
		to.Format = from.Format
	}
	if f.given("log-flush-frequency") {
		to.FlushFrequency.Duration = from.FlushFrequency.Duration
	}
	to.VModule = append(from.VModule, to.VModule...)
	for prefix, o := range map[string][2]*logsapi.OutputRoutingOptions{
		"log-text-": {&to.Options.Text.OutputRoutingOptions, &from.Options.Text.OutputRoutingOptions},
		"log-json-": {&to.Options.JSON.OutputRoutingOptions, &from.Options.JSON.OutputRoutingOptions},
	} {
		if f.given(prefix + "split-stream") {
			o[0].SplitStream = o[1].SplitStream
		}
		if f.given(prefix + "info-buffer-size") {
			o[0].InfoBufferSize = o[1].InfoBufferSize
		}
	}
}

// fairlead fills in Fairlead's part: the file's, and before it what flags say.
func (l *loading) fairlead() {
	f, c := l.flags, &l.config.Fairlead
	*c = defaultFairlead()
	path, must := f.FairleadConfig, true
	if path == "" && f.Config != "" {
		path, must = filepath.Join(filepath.Dir(f.Config), fairleadFile), false
	}
	_, err := os.Stat(path)
	switch {
	case path == "":
	case !must && errors.Is(err, fs.ErrNotExist):
		l.config.Files = append(l.config.Files, path)
	default:
		if doc := l.read(path, FairleadKind, FairleadAPIVersion); doc != nil {
			for _, n := range doc.rename() {
				l.warn("%s: %s is deprecated, use %s", path, n.Old, n.New)
			}
			unknown, errs, err := doc.into(FairleadKind, c)
			l.fail(path, err)
			for _, u := range unknown {
				errs = append(errs, field.Forbidden(field.NewPath(u), "there is no such field"))
			}
			l.refuse(path, append(doc.problems, errs...))
		}
	}
	for _, o := range f.changed() {
		if to := at(c, o.field); to.IsValid() {
			to.Set(at(&f.said.fairlead, o.field))
		}
	}
}

// ownMode is the mode on Windows, and of manifests without a file of kube-proxy's: no user there expects the meaning of
// kube-proxy's default.
func (l *loading) ownMode() {
	if windows(l.flags.planes) {
		setDefault(&l.config.KubeProxy.Mode, ModeKernelspace)
	}
	if l.flags.Config == "" && len(l.config.Fairlead.Manifests) > 0 {
		setDefault(&l.config.KubeProxy.Mode, ModeNFTables)
	}
}

// read reads a file of a kind, or nil, if there is nothing to make of it.
func (l *loading) read(path, kind, apiVersion string) *document {
	l.config.Files = append(l.config.Files, path)
	data, err := l.flags.Read(path)
	if err != nil {
		l.fatal = errors.Join(l.fatal, fmt.Errorf("the %s cannot be read: %w", kind, err))
		return nil
	}
	doc, err := parse(data)
	if err == nil {
		err = doc.wrongKind(kind, apiVersion)
	}
	if err != nil {
		l.fail(path, err)
		return nil
	}
	return doc
}

// fail notes that there is nothing to make of a file.
func (l *loading) fail(path string, err error) {
	if err == nil {
		return
	}
	for line := range strings.Lines(err.Error()) {
		l.fatal = errors.Join(l.fatal, fmt.Errorf("%s: %s", path, strings.TrimRight(line, "\n")))
	}
}

func (l *loading) refuse(path string, found field.ErrorList) {
	slices.SortStableFunc(found, func(a, b *field.Error) int { return strings.Compare(a.Field, b.Field) })
	for _, e := range found {
		text := e.Error()
		if e.Field == "" || e.Field == "<nil>" {
			text = e.Detail
		}
		l.errs = append(l.errs, fmt.Errorf("%s: %s", path, text))
	}
}

// judge applies the schemas and rules to what has resulted, and names the flag or the file that is wrong.
func (l *loading) judge() {
	for _, e := range l.config.judge(l.flags.planes) {
		if flag, rest := l.flags.blame(e.Field); flag != "" {
			e.Field = flag + rest
			l.errs = append(l.errs, e)
			continue
		}
		file := l.flags.Config
		if isOwn(e.Field) {
			file = l.config.Files[len(l.config.Files)-1]
		}
		l.refuse(file, field.ErrorList{e})
	}
}

// blame is the flag that gave a field its value, or should have given it one, and the rest of the field's path. If it
// was a file, the flag is empty.
func (f *Flags) blame(path string) (flag, rest string) {
	for _, o := range f.options {
		if f.Config != "" && !(o.always && f.given(o.flag)) {
			continue
		}
		for _, at := range strings.Fields(o.field) {
			rest, ok := strings.CutPrefix(path, at)
			if ok && (rest == "" || rest[0] == '[' || rest[0] == '.') && (!isOwn(at) || f.given(o.flag)) {
				return "--" + o.flag, rest
			}
		}
	}
	return "", ""
}
