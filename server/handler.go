package server

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/pprof"
	"strings"
)

// newHandler routes by path only, as kube-proxy does: it looks at the method where one changes
// something.
func newHandler(o Options) http.Handler {
	checks := newChecks()
	pages := newPages(o)
	mux := http.NewServeMux()
	mux.Handle("/metrics", o.Metrics)
	mux.Handle("/metrics/slis", checks.handler())
	mux.Handle("/healthz", http.HandlerFunc(checks.healthz))
	mux.Handle("/healthz/ping", text(func() string { return "ok" }))
	mux.Handle("/proxyMode", text(o.Mode))
	mux.Handle("/configz", configz(o.Config))
	mux.Handle("/statusz", when(o.Statusz, page{kind: "Statusz", text: pages.statusText, object: pages.status}))
	mux.Handle("/flagz", when(o.Flagz, page{kind: "Flagz", text: pages.flagText, object: pages.flags}))
	mux.Handle("/debug/", when(o.Profiling, debugHandler(o.Verbosity)))
	return mux
}

func text(body func() string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		header(w, "text/plain; charset=utf-8")
		fmt.Fprint(w, body())
	})
}

func header(w http.ResponseWriter, contentType string) {
	w.Header().Set("Content-Type", contentType)
	w.Header().Set("X-Content-Type-Options", "nosniff")
}

func configz(config func() map[string]any) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		body, err := json.Marshal(config())
		if err != nil {
			http.Error(w, "configuration: "+err.Error(), http.StatusInternalServerError)
			return
		}
		header(w, "application/json")
		_, _ = w.Write(body)
	})
}

// when hides what is not wanted.
func when(wanted func() bool, h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if wanted == nil || !wanted() {
			http.NotFound(w, r)
			return
		}
		h.ServeHTTP(w, r)
	})
}

func debugHandler(verbosity func(string) error) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/debug/pprof", http.RedirectHandler("/debug/pprof/", http.StatusFound))
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	mux.HandleFunc("/debug/flags", listFlags)
	mux.HandleFunc("/debug/flags/", listFlags)
	mux.Handle("/debug/flags/v", setVerbosity(verbosity))
	return mux
}

func listFlags(w http.ResponseWriter, _ *http.Request) {
	header(w, "text/html; charset=utf-8")
	fmt.Fprint(w, "<!DOCTYPE html><title>/debug/flags/</title>\n",
		"<p>PUT a number to <code>/debug/flags/v</code>: the log's verbosity\n")
}

// maxValue bounds what a flag can be set to.
const maxValue = 100

func setVerbosity(set func(string) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer := func(status int, message string) {
			header(w, "text/plain")
			w.WriteHeader(status)
			fmt.Fprintln(w, message)
		}
		if r.Method != http.MethodPut || set == nil {
			answer(http.StatusNotAcceptable, "unsupported: PUT sets it, if the log has a verbosity")
			return
		}
		value, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxValue))
		if err == nil {
			err = set(strings.TrimSpace(string(value)))
		}
		if err != nil {
			answer(http.StatusBadRequest, err.Error())
			return
		}
		answer(http.StatusOK, fmt.Sprintf("the verbosity is %s now", value))
	})
}
