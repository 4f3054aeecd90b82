package report

import (
	"cmp"
	"fmt"
	"html"
	"html/template"
	"math"
	"slices"
	"strings"
	"unicode/utf8"

	"fairlead.dev/fairlead/lab/study"
)

// picture is a chart in SVG: a path for the grid, texts, and for each mode a path of its line and one of its marks. The
// figures are in the table.
type picture template.HTML

// The sizes of pictures, in units of which a phone shows about a pixel each.
const (
	pictureWidth = 340
	lineHeight   = 190
	rowHeight    = 17
	left         = 58.0
	right        = pictureWidth - 12.0
	top          = 8.0
)

// none stands for no figure.
func none() float64 { return math.NaN() }

// drawLines draws the groups that have a mode with figures at several sizes, all with the same axes.
func (e *exhibit) drawLines(axisName string, unit study.Unit, sizes []int) {
	var domain []float64
	var at []int
	for _, g := range e.Groups {
		for _, r := range g.Rows {
			for i, v := range r.values {
				if !math.IsNaN(v) && r.several() {
					domain, at = append(domain, v), append(at, sizes[i])
				}
			}
		}
	}
	if len(domain) == 0 {
		return
	}
	bottom := lineHeight - 32.0
	y := newAxis(domain, unit, bottom, top)
	first, last := float64(slices.Min(at)), float64(slices.Max(at))
	x := axis{low: first, high: last, from: left + 8, to: right - 6, log: first > 0 && last > 4*first}
	frame := y.frame(unit) + x.sizes(at, bottom) +
		text("a", (left+right)/2, lineHeight-3, axisName)
	for i, g := range e.Groups {
		if slices.ContainsFunc(g.Rows, exhibitRow.several) {
			e.Groups[i].Picture = svg(lineHeight, e.Title+" by "+axisName+": "+g.Label, frame+g.lines(x, y, sizes))
		}
	}
}

// several reports whether a mode has figures at several sizes.
func (r exhibitRow) several() bool {
	n := 0
	for _, v := range r.values {
		n += one(!math.IsNaN(v))
	}
	return n > 1
}

// frame are the lines and numbers of the axis at the left.
func (a axis) frame(unit study.Unit) string {
	var grid, texts strings.Builder
	for _, t := range a.ticks() {
		at := a.at(t)
		fmt.Fprintf(&grid, "M%s %sH%s", px(left), px(at), px(right))
		texts.WriteString(text("y", left-5, at+4, quantity(unit, t)))
	}
	return `<path class="g" d="` + grid.String() + `"/>` + texts.String()
}

// sizes are the numbers of the axis below.
func (a axis) sizes(at []int, bottom float64) string {
	var texts strings.Builder
	slices.Sort(at)
	last := math.Inf(-1)
	for _, n := range slices.Compact(at) {
		if x := a.at(float64(n)); x-last > 40 {
			texts.WriteString(text("x", x, bottom+14, brief(n)))
			last = x
		}
	}
	return texts.String()
}

// lines are those of the modes.
func (g group) lines(x, y axis, sizes []int) string {
	var all strings.Builder
	for _, r := range g.Rows {
		if !r.several() {
			continue
		}
		var line, marks strings.Builder
		for i, v := range r.values {
			if math.IsNaN(v) {
				continue
			}
			at, up := x.at(float64(sizes[i])), y.at(min(max(v, y.low), y.high))
			fmt.Fprintf(&line, "%s%s %s", cmp.Or(map[bool]string{true: "M"}[line.Len() == 0], "L"), px(at), px(up))
			marks.WriteString(shape(r.who, at, up))
		}
		fmt.Fprintf(&all, `<g class="%s"><path class="l" d="%s"/><path class="m" d="%s"/></g>`, r.Class, line.String(),
			marks.String())
	}
	return all.String()
}

// bars draws the first column of a group.
func (g group) bars(unit study.Unit) picture {
	var all strings.Builder
	name, domain := 60.0, []float64{}
	rows := slices.DeleteFunc(slices.Clone(g.Rows), func(r exhibitRow) bool { return math.IsNaN(r.values[0]) })
	for _, r := range rows {
		name = max(name, 12+6.1*float64(utf8.RuneCountInString(r.Name)))
		domain = append(domain, r.values[0])
	}
	if len(domain) == 0 {
		return ""
	}
	x := axis{high: cmp.Or(slices.Max(domain), 1), from: name, to: right - 46}
	for i, r := range rows {
		y := top + rowHeight*float64(i)
		fmt.Fprintf(&all, `<path class="b %s" d="M%s %sh%sv11h-%sz"/>`, r.Class, px(name), px(y+2),
			px(max(1, x.at(r.values[0])-name)), px(max(1, x.at(r.values[0])-name)))
		all.WriteString(text("n", name-6, y+12, r.Name) + text("v", x.at(r.values[0])+4, y+12, quantity(unit, r.values[0])))
	}
	return svg(int(top)*2+rowHeight*len(rows), g.Label, all.String())
}

func svg(height int, title, body string) picture {
	return picture(fmt.Sprintf(`<svg viewBox="0 0 %d %d" role="img" aria-label="%s">%s</svg>`, pictureWidth, height,
		html.EscapeString(title), body))
}

func text(class string, x, y float64, says string) string {
	return fmt.Sprintf(`<text class="%s" x="%s" y="%s">%s</text>`, class, px(x), px(y), html.EscapeString(says))
}

// HTML is for the template.
func (p picture) HTML() template.HTML { return template.HTML(p) }

func one(is bool) int {
	if is {
		return 1
	}
	return 0
}

// class is the plane and the kind of a contender, for its colour and line.
func class(c study.Contender) string { return planeClass(c) + " " + string(c.Kind) }

// planeClass is the plane, if it is one with a colour of its own.
func planeClass(c study.Contender) string {
	if c.Kind == study.Direct || c.Kind == study.Again {
		return "none"
	}
	if planeRank(c.Plane) < len(planes()) {
		return family(c.Plane)
	}
	return "other"
}

// shape is a mark that tells planes apart without colour, at a place.
func shape(c study.Contender, x, y float64) string {
	of := planeClass(c)
	if of == "iptables" && c.Plane != of {
		of = "legacy"
	}
	path := cmp.Or(map[string]string{
		"nftables":  "m-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0z",
		"ebpf":      "m-3-3h6v6h-6z",
		"iptables":  "m0-4l4 7h-8z",
		"legacy":    "m-3-4v8l7-4z",
		"ipvs":      "m0 4l4-7h-8z",
		"userspace": "m-4-1h3v-3h2v3h3v2h-3v3h-2v-3h-3z",
	}[of], "m-2 0a2 2 0 1 0 4 0a2 2 0 1 0-4 0z")
	return "M" + px(x) + " " + px(y) + path
}

// px writes a coordinate.
func px(v float64) string { return strings.TrimSuffix(fmt.Sprintf("%.1f", v), ".0") }
