package report

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"fairlead.dev/fairlead/lab/study"
)

// scale is a larger or smaller unit: from so much on it is used.
type scale struct {
	from, times float64
	name        string // as it follows the number
}

// scales are those of a unit, the smallest first.
func scales(u study.Unit) []scale {
	return map[study.Unit][]scale{
		study.Seconds: {
			{0, 1e9, " ns"}, {1e-6, 1e6, " µs"}, {1e-3, 1e3, " ms"}, {1, 1, " s"},
			{120, 1.0 / 60, " min"}, {7200, 1.0 / 3600, " h"},
		},
		study.Bytes: {
			{0, 1, " B"}, {1 << 10, 1.0 / (1 << 10), " KiB"}, {1 << 20, 1.0 / (1 << 20), " MiB"},
			{1 << 30, 1.0 / (1 << 30), " GiB"},
		},
		study.BitRate:   {{0, 1, " bit/s"}, {1e3, 1e-3, " kbit/s"}, {1e6, 1e-6, " Mbit/s"}, {1e9, 1e-9, " Gbit/s"}},
		study.PerSecond: {{0, 1, "/s"}},
		study.Share:     {{0, 100, " %"}},
	}[u]
}

// quantity is a value with its unit, to three digits.
func quantity(u study.Unit, v float64) string {
	best := unitScale(u, v)
	if v == 0 && u == study.Seconds {
		return "0"
	}
	return digits(v*best.times) + best.name
}

// unitScale is the one that suits a value.
func unitScale(u study.Unit, v float64) scale {
	best := scale{times: 1, name: strings.TrimRight(" "+string(u), " ")}
	for _, s := range scales(u) {
		if math.Abs(v) >= s.from*0.9995 {
			best = s
		}
	}
	return best
}

// digits rounds to three digits; large numbers stay whole, with commas.
func digits(v float64) string {
	if math.Abs(v) >= 1000 {
		return study.Number(int(math.Round(v)))
	}
	if v != 0 {
		power := math.Pow(10, math.Floor(math.Log10(math.Abs(v)))-2)
		v = math.Round(v/power) * power
	}
	if math.Abs(v-math.Round(v)) < 1e-9 {
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return strconv.FormatFloat(v, 'f', max(0, 2-int(math.Floor(math.Log10(math.Abs(v))))), 64)
}

// times writes a ratio: two digits behind the point, or as many as say something.
func times(r float64) string {
	switch {
	case r >= 100:
		return study.Number(int(math.Round(r)))
	case r >= 10:
		return fmt.Sprintf("%.1f", r)
	case r >= 0.1 || r == 0:
		return fmt.Sprintf("%.2f", r)
	}
	return strconv.FormatFloat(r, 'g', 2, 64)
}

// tellable is how far apart bounds may be to be worth telling; those of few rounds are infinite.
const tellable = 100

// String is the ratio with its bounds, and a sign where no difference matters, or nothing is decided.
func (c Comparison) String() string {
	text := times(c.Median)
	if c.High <= tellable*c.Low {
		text += " (" + times(c.Low) + "–" + times(c.High) + ")"
	}
	switch {
	case c.Alike():
		text += " ="
	case c.Vague():
		text += " ?"
	}
	return text
}

// counted writes "1 Service", "1,000 Services".
func counted(n int, of string) string {
	if n == 1 {
		of = strings.TrimSuffix(of, "s")
	}
	return strings.TrimSpace(study.Number(n) + " " + of)
}

// listed writes "a, b and c".
func listed(all []string) string {
	if len(all) < 2 {
		return strings.Join(all, "")
	}
	return strings.Join(all[:len(all)-1], ", ") + " and " + all[len(all)-1]
}

// tally says how many there are of each.
func tally[K comparable](counts map[K]int, format string, order ...K) string {
	var parts []string
	for _, k := range order {
		if counts[k] > 0 {
			parts = append(parts, fmt.Sprintf(format, counts[k], k))
		}
	}
	return listed(parts)
}

// signed writes an exponent.
func signed(v float64) string {
	text := fmt.Sprintf("%.2f", v)
	if text == "-0.00" {
		return "0.00"
	}
	return strings.Replace(text, "-", "−", 1)
}
