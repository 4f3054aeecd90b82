package report

import (
	"cmp"
	"fmt"
	"math"
	"strings"
	"unicode/utf8"

	"fairlead.dev/fairlead/lab/study"
)

// picture is a chart of a block as a template draws it: the same figures with another axis are another picture.
type picture struct {
	ID, Class   string // of the element
	Title, Desc string
	Width       int
	Height      int
	X, Y        []tick
	XName       string
	Names       []tick  // of rows, at the left
	NamesAt     string  // where they end
	Band        string  // a path: what may be chance
	One         string  // a path: no proxy
	Series      []drawn // by contender
	Others      []mark  // what others have published
}

// tick is a place on an axis.
type tick struct {
	At, Text string
}

// drawn is a contender's part of a picture.
type drawn struct {
	Class      string
	Line, Bars string // paths
	Marks      []mark
}

// Bottom is where the axis below is.
func (p picture) Bottom() string {
	if len(p.Names) > 0 {
		return px(float64(p.Height) - 34)
	}
	return px(float64(p.Height) - 44)
}

// mark is a point.
type mark struct {
	X, Y  string
	Shape string // a path around 0,0
	At    string // where on the axis
	Says  string
}

// The sizes of pictures, in units of which a phone shows a little less than a pixel each.
const (
	pictureWidth = 380
	lineHeight   = 270
	rowHeight    = 23
	left         = 62.0
	right        = pictureWidth - 14.0
	top          = 12.0
)

// shown is how a block is drawn.
type shown struct {
	stats *Statistics
	block
	relative, log bool
	order         map[string]int // of contenders in the section
	domain        []float64      // values that the axis has to show: those of all cases
}

// point is a figure with its bounds, as it is shown; ok is false for what cannot be.
func (v shown) point(size int, c study.Contender) (value, low, high float64, ok bool) {
	e, ok := v.stats.estimate(v.at(size, c), v.figure.Name)
	if !ok {
		return 0, 0, 0, false
	}
	switch {
	case v.relative && c.Kind == study.Direct:
		value, low, high = 1, 1, 1
	case v.relative && e.Direct == nil:
		return 0, 0, 0, false
	case v.relative:
		value, low, high = e.Direct.Median, e.Direct.Low, e.Direct.High
	default:
		value, low, high = e.Value, e.Value, e.Value
	}
	if math.IsInf(high, 0) {
		low, high = value, value
	}
	return value, low, high, !v.log || value > 0
}

// values are all that a picture of the block has to show.
func (v shown) values() (all []float64) {
	for _, c := range v.who {
		for _, n := range v.sizes {
			if value, low, high, ok := v.point(n, c); ok {
				all = append(all, value)
				if high < 3*value { // wider bounds are cut off
					all = append(all, high)
				}
				if low > value/3 {
					all = append(all, low)
				}
			}
		}
	}
	return all
}

// lines draws figures by size.
func (v shown) lines() picture {
	p := v.picture(lineHeight)
	bottom := lineHeight - 44.0
	y := v.newAxis(bottom, top)
	x := v.xAxis()
	last := -math.MaxFloat64
	for _, n := range v.sizes {
		if at := x.at(float64(n)); at-last > 36 {
			p.X, last = append(p.X, tick{px(at), brief(n)}), at
		}
	}
	for _, t := range y.ticks() {
		p.Y = append(p.Y, tick{px(y.at(t)), ticked(v.figure.Unit, v.relative, t)})
	}
	p.XName = v.axis
	if v.relative {
		p.Band = v.band(x, y)
		p.One = "M" + px(left) + " " + px(clamp(y, 1)) + "H" + px(right)
	}
	for _, c := range v.who {
		p.Series = append(p.Series, v.line(c, x, y))
	}
	if !v.relative {
		p.Others = v.others(x, y)
	}
	return p
}

// xAxis is that of sizes.
func (v shown) xAxis() axis {
	low, high := float64(v.sizes[0]), float64(v.largest())
	return axis{low: low, high: high, from: left + 10, to: right - 8, log: low > 0 && high > 4*low}
}

// band is what does not matter, at each size.
func (v shown) band(x, y axis) string {
	var up, down []string
	for _, n := range v.sizes {
		p := v.place
		p.size = n
		spread := v.stats.margin(p, v.figure.Name)
		at := px(x.at(float64(n)))
		up = append(up, at+" "+px(clamp(y, spread)))
		down = append([]string{at + " " + px(clamp(y, 1/spread))}, down...)
	}
	return "M" + strings.Join(append(up, down...), "L") + "Z"
}

// clamp is where a value is, or the edge that is near.
func clamp(a axis, v float64) float64 {
	return a.at(min(max(v, a.low), a.high))
}

// line is a contender's.
func (v shown) line(c study.Contender, x, y axis) drawn {
	d := drawn{Class: v.class(c)}
	var path, bars []string
	for _, n := range v.sizes {
		value, low, high, ok := v.point(n, c)
		if !ok {
			continue
		}
		at, up := px(x.at(float64(n))), px(clamp(y, value))
		path = append(path, at+" "+up)
		if low != high {
			bars = append(bars, "M"+at+" "+px(clamp(y, low))+"V"+px(clamp(y, high)))
		}
		d.Marks = append(d.Marks, mark{at, up, shape(c), v.sized(n), v.says(n, c)})
	}
	if len(path) > 1 {
		d.Line = "M" + strings.Join(path, "L")
	}
	d.Bars = strings.Join(bars, "")
	return d
}

// says is what a point says.
func (v shown) says(size int, c study.Contender) string {
	return c.Name + ": " + v.stats.cell(v.block, size, c, true)
}

// others are the published figures, as far as the axes reach.
func (v shown) others(x, y axis) (all []mark) {
	for _, p := range v.stats.publishedFor(v.block) {
		n := float64(p.Size)
		if n < x.low || n > x.high || p.Value < y.low || p.Value > y.high {
			continue
		}
		all = append(all, mark{
			px(x.at(n)), px(y.at(p.Value)), "M-5 0L0 -5L5 0L0 5Z", v.sized(p.Size), "published: " + p.String(),
		})
	}
	return all
}

// rowsPicture draws a line for each contender, where nothing grows.
func (v shown) rowsPicture() picture {
	name := 60.0
	for _, c := range v.who {
		name = max(name, 16+6.4*float64(utf8.RuneCountInString(c.Name)))
	}
	height := int(top) + rowHeight*len(v.who) + 34
	p := v.picture(height)
	x := v.newAxis(name+8, right-6)
	bottom := top + float64(rowHeight*len(v.who))
	last := -math.MaxFloat64
	for _, t := range x.ticks() {
		text := ticked(v.figure.Unit, v.relative, t)
		if at := x.at(t); at-last > 9+6*float64(len(text)) {
			p.X, last = append(p.X, tick{px(at), text}), at
		}
	}
	size := v.largest()
	if v.relative {
		one := v.place
		one.size = size
		spread := v.stats.margin(one, v.figure.Name)
		from, to := px(clamp(x, 1/spread)), px(clamp(x, spread))
		p.Band = fmt.Sprintf("M%s %sH%sV%sH%sZ", from, px(top), to, px(bottom), from)
		p.One = "M" + px(clamp(x, 1)) + " " + px(top) + "V" + px(bottom)
	}
	for i, c := range v.who {
		y := top + rowHeight*(float64(i)+0.5)
		p.Names, p.NamesAt = append(p.Names, tick{px(y), c.Name}), px(name-2)
		value, low, high, ok := v.point(size, c)
		if !ok {
			continue
		}
		d := drawn{Class: v.class(c), Marks: []mark{{px(clamp(x, value)), px(y), shape(c), c.Name, v.says(size, c)}}}
		if low != high {
			d.Bars = "M" + px(clamp(x, low)) + " " + px(y) + "H" + px(clamp(x, high))
		}
		if !v.relative && !v.log {
			d.Line = "M" + px(x.at(max(0, x.low))) + " " + px(y) + "H" + px(clamp(x, value))
		}
		p.Series = append(p.Series, d)
	}
	return p
}

// picture is an empty one.
func (v shown) picture(height int) picture {
	class := []string{"value", "ratio"}[one(v.relative)] + " " + []string{"lin", "log"}[one(v.log)]
	unit := "measured"
	if v.relative {
		unit = "times direct access"
	}
	return picture{
		Class: class, Width: pictureWidth, Height: height, Title: v.title() + ", " + unit, Desc: v.description(),
	}
}

func one(is bool) int {
	if is {
		return 1
	}
	return 0
}

// description says in words what a picture shows.
func (v shown) description() string {
	ranking := v.stats.ranking(v.block, v.largest())
	if len(ranking) == 0 {
		return v.figure.Does + "."
	}
	text := v.where(v.largest()) + v.stats.ranked(v.block, ranking) + "."
	return upper(v.figure.Does) + ". " + text + " All values are in the table below."
}

// class identifies a contender: a number for the legend, its plane and its kind.
func (v shown) class(c study.Contender) string {
	return fmt.Sprintf("s%d %s %s", v.order[c.Name], planeClass(c), c.Kind)
}

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

// shape is a mark that tells planes apart without colour.
func shape(c study.Contender) string {
	class := planeClass(c)
	if class == "iptables" && c.Plane != class {
		return "M-3.6 -4.4V4.4L4.4 0Z"
	}
	return cmp.Or(map[string]string{
		"nftables":  "M-4 0A4 4 0 1 0 4 0A4 4 0 1 0 -4 0Z",
		"ebpf":      "M-3.6 -3.6H3.6V3.6H-3.6Z",
		"iptables":  "M0 -4.6L4.4 3.4H-4.4Z",
		"ipvs":      "M0 4.6L4.4 -3.4H-4.4Z",
		"userspace": "M-4.4 -1.5H-1.5V-4.4H1.5V-1.5H4.4V1.5H1.5V4.4H-1.5V1.5H-4.4Z",
	}[class], "M-2.6 0A2.6 2.6 0 1 0 2.6 0A2.6 2.6 0 1 0 -2.6 0Z")
}

// px writes a coordinate.
func px(v float64) string { return fmt.Sprintf("%.1f", v) }
