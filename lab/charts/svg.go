package main

import (
	"fmt"
	"html"
	"math"
	"slices"
	"strings"
)

// The places in a chart, in pixels.
const (
	width      = 760
	left       = 190 // of the bars; before it stand the labels
	right      = 90  // for the figure behind the longest bar
	barHeight  = 14
	groupSpace = 10
	head       = 34
	legendLine = 18
)

// style has colours that can be told apart in light and dark, and by people who do not see all colours (Okabe and Ito).
const style = `<style>
.back{fill:#fff}text{font:12px system-ui,sans-serif;fill:#24292f}
.title{font-weight:600;font-size:14px}.label{text-anchor:end}
.s0{fill:#0072b2}.s1{fill:#d55e00}.s2{fill:#009e73}.s3{fill:#cc79a7}.s4{fill:#e69f00}.s5{fill:#7f7f7f}
@media(prefers-color-scheme:dark){.back{fill:#0d1117}text{fill:#d0d7de}.s0{fill:#56b4e9}}
</style>`

func (c chart) svg() string {
	shown := c.shown()
	scale := c.scale()
	var body strings.Builder
	y := head + legendLine*((len(shown)+2)/3)
	if len(shown) == 1 {
		y = head
	} else {
		c.legend(&body, shown)
	}
	for _, g := range c.groups {
		middle := float64(y) + float64(len(g.bars)*barHeight)/2 + 4
		fmt.Fprintf(&body, "<text class=\"label\" x=\"%d\" y=\"%.0f\">%s</text>\n",
			left-8, middle, html.EscapeString(g.label))
		for _, b := range g.bars {
			long := scale(b.value)
			fmt.Fprintf(&body, "<rect class=\"s%d\" x=\"%d\" y=\"%d\" width=\"%.1f\" height=\"%d\"/>"+
				"<text x=\"%.1f\" y=\"%d\">%s</text>\n", slices.Index(shown, b.series)%6, left, y+1, long, barHeight-2,
				left+long+5, y+barHeight-3, html.EscapeString(b.text))
			y += barHeight
		}
		y += groupSpace
	}
	title := html.EscapeString(c.title)
	return fmt.Sprintf("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"%s\">\n"+
		"%s\n<rect class=\"back\" width=\"100%%\" height=\"100%%\"/>\n"+
		"<text class=\"title\" x=\"8\" y=\"20\">%s%s</text>\n%s</svg>\n",
		width, y, title, style, title, c.scaleName(), body.String())
}

// shown are the series that have a figure.
func (c chart) shown() (all []int) {
	for _, g := range c.groups {
		for _, b := range g.bars {
			if !slices.Contains(all, b.series) {
				all = append(all, b.series)
			}
		}
	}
	slices.Sort(all)
	return all
}

func (c chart) legend(body *strings.Builder, shown []int) {
	for i, s := range shown {
		x, y := left+i%3*190, head+i/3*legendLine
		fmt.Fprintf(body, "<rect class=\"s%d\" x=\"%d\" y=\"%d\" width=\"10\" height=\"10\"/>"+
			"<text x=\"%d\" y=\"%d\">%s</text>\n",
			i%6, x, y, x+15, y+9, html.EscapeString(c.series[s]))
	}
}

func (c chart) bounds() (least, most float64) {
	least = math.Inf(1)
	for _, g := range c.groups {
		for _, b := range g.bars {
			least, most = min(least, b.value), max(most, b.value)
		}
	}
	return least, most
}

func (c chart) logarithmic() bool {
	least, most := c.bounds()
	return most > 30*least
}

func (c chart) scaleName() string {
	if c.logarithmic() {
		return " (logarithmic scale)"
	}
	return ""
}

// scale returns the length of a bar. A logarithmic one begins at half of the least value, so that each bar is seen.
func (c chart) scale() func(float64) float64 {
	least, most := c.bounds()
	const long = width - left - right
	if !c.logarithmic() {
		return func(v float64) float64 { return long * v / most }
	}
	return func(v float64) float64 { return long * math.Log(v/least*2) / math.Log(most/least*2) }
}
