// Package ui is the page of "fairlead ui": it shows in a browser what the running agent does, and changes nothing.
//
//	browsers ── every 2 s: GET /state ──► Handler ── every 2 s at most, for all browsers: Ask ──► agent
//	         ◄── at most 100 rows ──────   │ sorts, filters, cuts pages
//
// So neither the agent nor a browser does more work for many pages or many Services. Without open pages the agent is
// asked nothing.
package ui

import (
	"context"
	"embed"
	"encoding/json"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
)

// Ask puts a question to the running agent.
type Ask func(ctx context.Context, question string) ([]byte, error)

// Head is what the page says of the node.
type Head struct {
	Facts  [][2]string `json:"facts"` // names and texts, what people look for first
	Status string      `json:"status"`
	Alarms []string    `json:"alarms"` // what is wrong
}

// state is what a browser gets.
type state struct {
	snapshot
	Matching int             `json:"matching"` // rows, of which one page follows
	Page     int             `json:"page"`
	Pages    int             `json:"pages"`
	Rows     []*row          `json:"rows"`
	Open     json.RawMessage `json:"open,omitempty"` // the agent's answer for the Service of the row that is open
}

const pageRows = 100

//go:embed index.html page.css page.js
var files embed.FS

// Handler serves the page of an agent. host is what the user has it listen on: a name or address; empty: all addresses.
func Handler(ask Ask, host string) http.Handler {
	p := &poller{agent: ask, last: &snapshot{}}
	mux := http.NewServeMux()
	mux.Handle("GET /", http.FileServerFS(files))
	mux.HandleFunc("GET /state", p.state)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; "+
			"connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
		w.Header().Set("Cross-Origin-Resource-Policy", "same-origin")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("Cache-Control", "no-store")
		if !ours(r.Host, host) {
			http.Error(w, "ask for this page by localhost, or by the address in --address", http.StatusForbidden)
			return
		}
		mux.ServeHTTP(w, r)
	})
}

// ours reports whether the page is asked for by a name that no other site can have. Else a site could resolve its name
// to this address, and its scripts would read the answers.
func ours(asked, host string) bool {
	if name, _, err := net.SplitHostPort(asked); err == nil {
		asked = name
	}
	asked = strings.Trim(asked, "[]")
	ip, _ := netip.ParseAddr(asked) // the zero value is no loopback address, and not valid
	listening, _ := netip.ParseAddr(host)
	if strings.EqualFold(asked, "localhost") || ip.IsLoopback() {
		return true
	}
	if host == "" || listening.IsUnspecified() {
		return ip.IsValid()
	}
	return strings.EqualFold(asked, host)
}

// state answers with a page of the rows that match, and with the Service of the row that is open.
func (p *poller) state(w http.ResponseWriter, r *http.Request) {
	s := p.current()
	rows := s.matching(r.FormValue("filter"), r.FormValue("state"))
	out := state{snapshot: *s, Matching: len(rows), Pages: max(1, (len(rows)+pageRows-1)/pageRows)}
	page, _ := strconv.Atoi(r.FormValue("page")) // what is no number is the first one
	out.Page = min(max(page, 0), out.Pages-1)
	first := out.Page * pageRows
	out.Rows = rows[first:min(first+pageRows, len(rows))]
	for _, row := range out.Rows {
		if row.Key == r.FormValue("open") {
			out.Open = p.open(r.Context(), row)
		}
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(out) // fails if the browser has gone
}
