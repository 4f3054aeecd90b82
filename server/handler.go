package server

import "net/http"

func newHandler(o Options) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/metrics", o.Metrics)
	return mux
}
