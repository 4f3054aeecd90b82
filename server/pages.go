package server

import (
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-base/metrics"
)

// pages are what /statusz and /flagz say. Their objects have the fields of config.k8s.io, whose types
// are in a library that would bring an API server along.
type pages struct {
	version string
	flagsOf func() map[string]string
	started time.Time
}

const component = "fairlead"

// emulated is the release of Kubernetes whose kube-proxy this is like.
const emulated = "1.37"

func newPages(o Options) *pages {
	p := &pages{version: o.Version, flagsOf: o.Flags, started: time.Now()}
	if seconds, err := metrics.GetProcessStart(); err == nil {
		p.started = time.Unix(int64(seconds), 0)
	}
	return p
}

// statusz is Statusz of config.k8s.io, v1beta1 and v1alpha1.
type statusz struct {
	metav1.TypeMeta
	Metadata         name        `json:"metadata"`
	StartTime        metav1.Time `json:"startTime"`
	UptimeSeconds    int64       `json:"uptimeSeconds"`
	GoVersion        string      `json:"goVersion"`
	BinaryVersion    string      `json:"binaryVersion"`
	EmulationVersion string      `json:"emulationVersion"`
	Paths            []string    `json:"paths"`
}

// flagz is Flagz of config.k8s.io, v1beta1 and v1alpha1.
type flagz struct {
	metav1.TypeMeta
	Metadata name              `json:"metadata"`
	Flags    map[string]string `json:"flags,omitempty"`
}

type name struct {
	Name string `json:"name"`
}

func (p *pages) status(of metav1.TypeMeta) any {
	return statusz{
		TypeMeta:         of,
		Metadata:         name{component},
		StartTime:        metav1.NewTime(p.started),
		UptimeSeconds:    int64(time.Since(p.started).Seconds()),
		GoVersion:        runtime.Version(),
		BinaryVersion:    p.version,
		EmulationVersion: emulated,
		Paths:            []string{"/configz", "/flagz", "/healthz", "/metrics", "/proxyMode"},
	}
}

func (p *pages) flags(of metav1.TypeMeta) any {
	return flagz{TypeMeta: of, Metadata: name{component}, Flags: p.flagsOf()}
}

func pageHeader(page string) string {
	const text = "\n%s %s\nFor people, who read what may change; programs ask for application/json.\n"
	return fmt.Sprintf(text, component, page)
}

func (p *pages) statusText() string {
	s := p.status(metav1.TypeMeta{}).(statusz)
	up := time.Duration(s.UptimeSeconds) * time.Second
	return pageHeader("statusz") + fmt.Sprintf(`
Started: %s
Up: %d hr %02d min %02d sec
Go version: %s
Binary version: %s
Emulation version: %s
Paths: %s
`, s.StartTime.Format(time.UnixDate), int(up.Hours()), int(up.Minutes())%60, int(up.Seconds())%60,
		s.GoVersion, s.BinaryVersion, s.EmulationVersion, strings.Join(s.Paths, " "))
}

func (p *pages) flagText() string {
	var b strings.Builder
	b.WriteString(pageHeader("flagz"))
	flags := p.flagsOf()
	for _, flag := range slices.Sorted(maps.Keys(flags)) {
		fmt.Fprintf(&b, "%s=%s\n", flag, flags[flag])
	}
	return b.String()
}
