package daemon

import (
	"bufio"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"fairlead.dev/fairlead/lab/allocs"
)

// FuzzSwitch sends arbitrary requests to the part of the control socket that takes orders. It must not panic, and its
// memory is bounded. Only a request for an existing data plane becomes an order.
func FuzzSwitch(f *testing.F) {
	f.Add("POST /switch?plane=ipvs HTTP/1.1\r\nHost: fairlead\r\n\r\n")
	f.Add("POST /switch HTTP/1.1\r\nHost: fairlead\r\nContent-Type: application/x-www-form-urlencoded\r\n" +
		"Content-Length: 10\r\n\r\nplane=ebpf")
	f.Add("DELETE /switch HTTP/1.1\r\nHost: fairlead\r\n\r\n")
	f.Add("PUT /switch?plane=%zz HTTP/1.1\r\nHost: fairlead\r\n\r\n")
	f.Fuzz(func(t *testing.T, text string) {
		r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(text)))
		if err != nil {
			return
		}
		s := &switches{orders: make(chan *switchOrder)}
		var orders atomic.Int32
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			for o := range s.orders {
				orders.Add(1)
				if !slices.Contains(Planes(), o.plane) {
					t.Errorf("%q orders the data plane %q", text, o.plane)
				}
				close(o.steps)
			}
		}()
		w := httptest.NewRecorder()
		allocs.Bound(t, len(text), func() { s.ServeHTTP(w, r.WithContext(t.Context())) })
		close(s.orders)
		<-ended
		if n := orders.Load(); w.Code != http.StatusOK && n > 0 || r.Method != http.MethodPost && n > 0 {
			t.Errorf("%q is answered by %d and orders a data plane", text, w.Code)
		}
	})
}
