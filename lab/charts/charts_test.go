package main

import (
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
)

const page = `
<!-- chart figures/a.svg: Times & sizes -->
| contender | small | large |
|---|---|---|
| one | 2 µs (1–3) | 4 ms |
| ` + "`two`" + ` | – | 1.5 s |

| no | chart |
|---|---|
| x | 1 |
`

func TestCharts(t *testing.T) {
	charts := find([]byte(page))
	if len(charts) != 1 || charts[0].file != "figures/a.svg" {
		t.Fatalf("charts: %+v", charts)
	}
	svg := charts[0].svg()
	for _, want := range []string{">one<", ">two<", ">2 µs<", ">4 ms<", ">1.5 s<", "Times &amp; sizes (logarithmic scale)"} {
		if !strings.Contains(svg, want) {
			t.Errorf("the chart lacks %s:\n%s", want, svg)
		}
	}
	for decoder := xml.NewDecoder(strings.NewReader(svg)); ; {
		if _, err := decoder.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
}
