package server

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	"github.com/munnerz/goautoneg"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// page answers as text, or as an object of config.k8s.io if it is asked for by its whole name, as
// "application/json;as=Statusz;v=v1beta1;g=config.k8s.io" (KEP-4827 and KEP-4828; the rules are those
// of k8s.io/apiserver/pkg/endpoints/handlers/negotiation).
type page struct {
	kind   string
	text   func() string
	object func(metav1.TypeMeta) any
}

const (
	jsonType = "application/json"
	yamlType = "application/yaml"
	textType = "text/plain"
	anyType  = "*/*"
	group    = "config.k8s.io"
)

// format is what was agreed upon.
type format struct{ mediaType, version string }

func (p page) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f, ok := p.negotiate(r.Header.Get("Accept"))
	switch {
	case !ok:
		refuse(w, r)
	case f.mediaType == textType:
		w.Header().Set("Content-Type", textType+"; charset=utf-8")
		fmt.Fprint(w, p.text())
	default:
		if f.version == "v1alpha1" {
			w.Header().Set("Warning", fmt.Sprintf("299 - %q", p.kind+" v1alpha1 is deprecated; use v1beta1"))
		}
		contentType := fmt.Sprintf("%s;g=%s;v=%s;as=%s", f.mediaType, group, f.version, p.kind)
		of := metav1.TypeMeta{Kind: p.kind, APIVersion: group + "/" + f.version}
		write(w, http.StatusOK, contentType, p.object(of))
	}
}

// negotiate chooses the format that the client likes best.
func (p page) negotiate(accept string) (format, bool) {
	if strings.TrimSpace(accept) == "" {
		return format{mediaType: textType}, true
	}
	for _, clause := range goautoneg.ParseAccept(accept) {
		version, object := p.version(clause.Params)
		plain := clause.Params["as"]+clause.Params["g"]+clause.Params["v"] == ""
		for _, mediaType := range []string{jsonType, yamlType, textType} {
			if matches(clause, mediaType) && (object && mediaType != textType || plain && mediaType == textType) {
				return format{mediaType, version}, true
			}
		}
	}
	return format{}, false
}

// version is the one of the object that a client names.
func (p page) version(params map[string]string) (version string, ok bool) {
	version = params["v"]
	ok = params["as"] == p.kind && params["g"] == group && (version == "v1beta1" || version == "v1alpha1")
	return version, ok
}

func matches(clause goautoneg.Accept, mediaType string) bool {
	asked := clause.Type + "/" + clause.SubType
	main, _, _ := strings.Cut(mediaType, "/")
	return asked == mediaType || asked == main+"/*" || asked == anyType
}

// refuse says what would be acceptable, as YAML if that is wanted.
func refuse(w http.ResponseWriter, r *http.Request) {
	contentType := jsonType
	for _, clause := range goautoneg.ParseAccept(r.Header.Get("Accept")) {
		if matches(clause, yamlType) && !matches(clause, jsonType) && clause.Params["as"] == "" {
			contentType = yamlType
		}
	}
	write(w, http.StatusNotAcceptable, contentType, metav1.Status{
		TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
		Status:   metav1.StatusFailure,
		Message:  fmt.Sprintf("only the following media types are accepted: %s, %s, %s", jsonType, yamlType, textType),
		Reason:   metav1.StatusReasonNotAcceptable,
		Code:     http.StatusNotAcceptable,
	})
}

func write(w http.ResponseWriter, status int, contentType string, object any) {
	body, err := json.MarshalIndent(object, "", "  ")
	if err == nil && strings.HasPrefix(contentType, yamlType) {
		body, err = yaml.JSONToYAML(body)
	}
	if err != nil { // none of our types can
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", contentType)
	w.WriteHeader(status)
	_, _ = w.Write(body)
}
