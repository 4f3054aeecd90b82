package traffic

import (
	"fmt"
	"math"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// Result is what a Load has seen. It can be written as JSON, and be read again.
type Result struct {
	// Elapsed is from the beginning of the first request to the end of the last one.
	Elapsed time.Duration
	// Done counts requests that were answered with status 200, or connections, datagrams or streams without an error. The
	// times are theirs alone.
	Done int
	// Errors counts the others by kind: Refused, Reset and so on, "status 503".
	Errors map[string]int
	// Unsent counts the requests of a load with a Rate whose time had come before its end, and for which no client was
	// free.
	Unsent int `json:",omitempty"`
	// Bytes of answers, without headers, or of bulk data.
	Bytes int64

	// These are the phases of a request, as ab(1) has them. Connect lasts until the connection is there, and Processing
	// from then until the end. Within it Waiting lasts from the last byte sent to the first one received. Processing is
	// what k6 calls http_req_duration. Requests on a connection that is there already have no Connect.
	Connect, Processing, Waiting Histogram
	// Total is all of it; with a Rate it counts from when the request should have begun.
	Total Histogram
	// Each is what became of each request, with Load.Each, in the order in which they ended.
	Each []Attempt `json:",omitempty"`
	// Intervals are the bytes of bulk data in one after the other of Load.Interval; the last one may be short.
	Intervals []int64 `json:",omitempty"`
}

// Attempt is a request.
type Attempt struct {
	At    time.Duration // when it should have begun, from the beginning of the load
	Took  time.Duration
	Error string `json:",omitempty"` // its kind, as in Errors
}

// PerSecond is how many requests were done in a second.
func (r Result) PerSecond() float64 { return perSecond(float64(r.Done), r.Elapsed) }

// BytesPerSecond is the throughput.
func (r Result) BytesPerSecond() float64 { return perSecond(float64(r.Bytes), r.Elapsed) }

func perSecond(n float64, took time.Duration) float64 {
	if took <= 0 {
		return 0
	}
	return n / took.Seconds()
}

// Failed is how many requests were not done.
func (r Result) Failed() (n int) {
	for _, count := range r.Errors {
		n += count
	}
	return n
}

// The bounds of what a Histogram tells apart: to three digits.
const (
	longest = 10 * time.Minute
	digits  = 3
)

// Histogram is many durations, each to a thousandth of itself. Its text is that of HdrHistogram's logs, which tools
// for them read, in nanoseconds. The zero Histogram is empty. A copy shares what is recorded.
type Histogram struct{ h *hdrhistogram.Histogram }

// Record adds one. It must not be called concurrently. Longer times count as ten minutes.
func (h *Histogram) Record(d time.Duration) {
	if h.h == nil {
		h.h = hdrhistogram.New(1, int64(longest), digits)
	}
	_ = h.h.RecordValue(int64(min(max(d, 0), longest))) // within its bounds
}

// Count is how many there are.
func (h Histogram) Count() int64 {
	if h.h == nil {
		return 0
	}
	return h.h.TotalCount()
}

// Quantile is the duration that a share of them does not exceed: 0.5 is the median. That of an empty one is 0.
func (h Histogram) Quantile(share float64) time.Duration {
	if h.Count() == 0 {
		return 0
	}
	return time.Duration(h.h.ValueAtQuantile(share * 100))
}

// MarshalText is part of encoding.TextMarshaler.
func (h Histogram) MarshalText() ([]byte, error) {
	if h.Count() == 0 {
		return nil, nil
	}
	return h.h.Encode(hdrhistogram.V2CompressedEncodingCookieBase)
}

// UnmarshalText is part of encoding.TextUnmarshaler.
func (h *Histogram) UnmarshalText(text []byte) (err error) {
	if h.h = nil; len(text) == 0 {
		return nil
	}
	if h.h, err = hdrhistogram.Decode(text); err != nil {
		return fmt.Errorf("this is no histogram: %w", err)
	}
	return nil
}

// Summary is what is told of durations, in seconds.
type Summary struct {
	N                               int64
	Min, Mean, SD, Median, P90, Max float64
}

// Summary of all that was recorded. That of an empty Histogram is zero.
func (h Histogram) Summary() Summary {
	n := h.Count()
	if n == 0 {
		return Summary{}
	}
	seconds := func(ns float64) float64 { return ns / 1e9 }
	at := func(share float64) float64 { return h.Quantile(share).Seconds() }
	s := Summary{
		N: n, Min: seconds(float64(h.h.Min())), Max: seconds(float64(h.h.Max())), Mean: seconds(h.h.Mean()),
		Median: at(0.5), P90: at(0.9),
	}
	if n > 1 { // of a sample, as ab has it
		s.SD = seconds(h.h.StdDev()) * math.Sqrt(float64(n)/float64(n-1))
	}
	return s
}
