package report

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/chromedp"

	"fairlead.dev/fairlead/lab/browser"
	"fairlead.dev/fairlead/lab/study"
)

// window is a browser that shows a page.
type window struct {
	t    *testing.T
	ctx  context.Context
	mu   sync.Mutex
	said []string // requests, and what the console says
}

// tester is for tests of the page of one Result in one browser.
type tester struct {
	browser context.Context
	path    string
	result  *study.Result
}

// The bounds of what a person takes in: the page, and Markdown.
const (
	mostBytes = 500_000
	published = "../../../docs/benchmark/2026-11-22"
)

func TestPage(t *testing.T) {
	t.Parallel()
	full, err := study.Read(filepath.Join(published, "result.json"))
	if err != nil {
		t.Fatal(err)
	}
	window := browser.Start(t)
	for name, r := range map[string]*study.Result{"made": made(), "full": full} {
		page := tester{window, filepath.Join(t.TempDir(), "page.html"), r}
		if err := os.WriteFile(page.path, written(t, HTML, r), 0o644); err != nil {
			t.Fatal(err)
		}
		t.Run(name, func(t *testing.T) {
			t.Run("has all parts and asks for nothing", page.complete)
			t.Run("on a phone", func(t *testing.T) { page.fits(t, "phone", 360, 740, chromedp.EmulateMobile) })
			t.Run("on a desktop", func(t *testing.T) { page.fits(t, "desktop", 1280, 900) })
			t.Run("in light colours", func(t *testing.T) { page.contrast(t, "light") })
			t.Run("in dark colours", func(t *testing.T) { page.contrast(t, "dark") })
			t.Run("for everybody", page.forEverybody)
			t.Run("printed", page.printed)
		})
	}
}

// A full run's reports are small: those that are made of it, and those in docs.
func TestSizes(t *testing.T) {
	t.Parallel()
	full, err := study.Read(filepath.Join(published, "result.json"))
	if err != nil {
		t.Fatal(err)
	}
	html, failed := os.ReadFile(filepath.Join(published, "report.html"))
	md, err := os.ReadFile(filepath.Join(published, "report.md"))
	if err := errors.Join(failed, err); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string][]byte{"made": written(t, HTML, full), "published": html} {
		if len(text) > mostBytes {
			t.Errorf("report.html, %s, has %d bytes; %d are the most", name, len(text), mostBytes)
		}
	}
	for name, text := range map[string][]byte{"made": written(t, Markdown, full), "published": md} {
		if n := bytes.Count(text, []byte("\n")); n > mostLines {
			t.Errorf("report.md, %s, has %d lines; %d are the most", name, n, mostLines)
		}
	}
}

// open shows the page in a tab of its own; before comes before it is loaded.
func (p tester) open(t *testing.T, before ...browser.Step) *window {
	t.Helper()
	w := &window{t: t}
	ctx, cancel := chromedp.NewContext(p.browser, chromedp.WithListener(w.hear))
	t.Cleanup(cancel)
	w.ctx = ctx
	w.run(browser.Command(network.Enable, network.EnableParams{}))
	w.run(before...)
	w.run(chromedp.Navigate("file://" + p.path))
	return w
}

// hear collects what a page that works never does.
func (w *window) hear(event any) {
	said := ""
	switch e := event.(type) {
	case *network.EventRequestWillBeSent:
		if e.Type == network.ResourceTypeDocument && strings.HasPrefix(e.Request.URL, "file:") || e.Request.URL == "data:," {
			return
		}
		said = "request: " + e.Request.URL
	default:
		said = browser.Complaint(event)
	}
	if said != "" {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.said = append(w.said, said)
	}
}

func (w *window) run(steps ...browser.Step) {
	w.t.Helper()
	if err := chromedp.Do(w.ctx, steps...); err != nil {
		w.t.Fatal(err)
	}
}

// quiet fails if the page has asked for something or complained.
func (w *window) quiet() {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.said) > 0 {
		w.t.Errorf("the page is not quiet:\n%s", strings.Join(w.said, "\n"))
	}
}

// lines is what a function in the page returns: an array of texts, which are to be these.
func (w *window) lines(what, script string, want ...string) {
	w.t.Helper()
	got, err := chromedp.Run(w.ctx, chromedp.Evaluate[[]string]("(() => {"+helpers+script+"})()"))
	if err != nil {
		w.t.Fatal(what, err)
	}
	if !slices.Equal(got, want) {
		w.t.Errorf("%s:\ngot:\n%s\nwant:\n%s", what, strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// shot keeps a picture of the whole page where FAIRLEAD_PICTURES says, for people to look at.
func (w *window) shot(name string) {
	w.t.Helper()
	dir := os.Getenv("FAIRLEAD_PICTURES")
	if dir == "" {
		return
	}
	picture, err := chromedp.Run(w.ctx, chromedp.FullScreenshot(100))
	if err != nil {
		w.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, name+".png"), picture, 0o644); err != nil {
		w.t.Fatal(err)
	}
}

const helpers = `
const all = (s, e = document) => [...e.querySelectorAll(s)];
const visible = (e) => e.getClientRects().length > 0 && getComputedStyle(e).visibility !== "hidden";
const name = (e) => (e.tagName + "." + (e.getAttribute("class") || "") + " " + e.textContent).slice(0, 90).trim();
`

// emptyCharts are those without marks.
const emptyCharts = `return all("svg").filter((s) => all(".m, .b", s).every((p) => !p.getAttribute("d"))).map(name);`

func (p tester) complete(t *testing.T) {
	w := p.open(t, chromedp.EmulateViewport(1280, 900))
	w.lines("charts", emptyCharts)
	var want []string
	for _, d := range p.result.Experiments {
		want = append(want, d.Name)
	}
	w.lines("experiments", `return all(".experiment h2").map((h) => h.textContent.trim());`, want...)
	w.lines("experiments without a table", `return all(".experiment").filter((e) => !e.querySelector("td")).map(name);`)
	w.lines("scripts", `return all("script").map(name);`)
	w.lines("order", `return all("main > section").map((s) => s.id).slice(0, 3);`, "board", "advice", want[0])
	w.quiet()
}

// tooWide are elements that stick out of the window, but for those in a box that scrolls by itself.
const tooWide = `
const wide = document.documentElement.clientWidth;
return (document.documentElement.scrollWidth > wide ? ["the page scrolls"] : []).concat(all("body *").filter((e) =>
  visible(e) && !e.closest(".scroll") && !e.closest("svg") && e.getBoundingClientRect().right > wide + 1 && !e.closest(".sr, .skip"))
  .map(name));`

// fits looks at the page in a window: nothing sticks out, and the scoreboard is seen without scrolling.
func (p tester) fits(t *testing.T, name string, width, height int64, options ...chromedp.EmulateViewportOption) {
	w := p.open(t, chromedp.EmulateViewport(width, height, options...))
	w.shot(name)
	w.lines("what is too wide", tooWide)
	w.lines("the scoreboard's end", fmt.Sprintf(`const r = document.querySelector(".board").getBoundingClientRect();
		return r.bottom <= %d && r.width > 0 ? [] : [String(r.bottom)];`, height))
	w.lines("text too small to read", `return all("body *").filter(visible).filter((e) => !e.closest(".sr, .skip") &&
		[...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) && e.getBoundingClientRect().height < 9).map(name);`)
	w.quiet()
}

// lowContrast are texts with less than 4.5:1, and lines and marks with less than 3:1.
const lowContrast = `
const parse = (c) => c.match(/[\d.]+/g).map(Number);
const light = (c) => { const [r, g, b] = parse(c).map((v) => v / 255).map((v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b; };
const behind = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
  if (!c.startsWith("rgba(0, 0, 0, 0")) return c; } return "rgb(255, 255, 255)"; };
const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + .05) / (y + .05); };
const texts = all("body *").filter((e) => visible(e) && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()));
const of = (e, what, least) => { const style = getComputedStyle(e), r = ratio(style[what], behind(e));
  return r < least ? [r.toFixed(2) + " " + name(e)] : []; };
return texts.flatMap((e) => e.closest("svg") ? of(e, "fill", 4.5) : of(e, "color", 4.5))
  .concat(all("svg .l, svg .m").filter(visible).flatMap((e) => of(e, "stroke", 3)));`

func (p tester) contrast(t *testing.T, scheme string) {
	w := p.open(t, chromedp.EmulateViewport(1280, 900), browser.Command(emulation.SetEmulatedMedia,
		emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{
			{Name: "prefers-color-scheme", Value: scheme}, {Name: "prefers-reduced-motion", Value: "reduce"},
		}}))
	w.shot(scheme)
	w.lines("low contrast", lowContrast)
	w.lines("motion", `return all("*").filter((e) => getComputedStyle(e).scrollBehavior === "smooth"
		|| parseFloat(getComputedStyle(e).transitionDuration) > 0).map(name);`)
}

// unlabelled are the elements that a screen reader cannot name, or that have a wrong place.
const unlabelled = `
const labelled = (e) => e.labels?.length > 0 || e.getAttribute("aria-label") || e.getAttribute("aria-labelledby")
  ?.split(" ").every((id) => document.getElementById(id)?.textContent.trim());
const ids = all("[id]").map((e) => e.id);
const levels = all("h1, h2, h3, h4").filter(visible).map((h) => Number(h.tagName[1]));
return all("input, select, svg[role=img], section, [role=region], nav").filter((e) => !labelled(e)).map((e) => "no name: " + name(e))
  .concat(ids.filter((id, i) => ids.indexOf(id) !== i).map((id) => "twice: " + id))
  .concat(levels.filter((l, i) => i > 0 && l > levels[i - 1] + 1).map((l) => "a heading of level " + l + " too deep"))
  .concat(all("svg:not([role=img]):not([aria-hidden=true])").map(name), all("table").filter((t) => !t.caption
    || t.querySelectorAll("th[scope]").length === 0).map(name), all("a").filter((a) => !a.textContent.trim()).map(name))
  .concat(all("nav a").filter((a) => !document.querySelector(a.getAttribute("href"))).map(name))
  .concat(document.documentElement.lang === "en" && all("h1").length === 1 && all("main").length === 1 ? [] : ["no landmarks"]);`

func (p tester) forEverybody(t *testing.T) {
	w := p.open(t, chromedp.EmulateViewport(1280, 900))
	w.lines("labels", unlabelled)
	w.lines("marks without words", `return all(".board .best, .board .worst").filter((e) =>
		!e.textContent.includes(e.className)).map(name);`)
}

func (p tester) printed(t *testing.T) {
	w := p.open(t)
	w.run(browser.Command(emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Media: "print"}))
	pdf, err := chromedp.Run(w.ctx, chromedp.PrintToPDF(func(o *page.PrintToPDFParams) {
		o.PrintBackground, o.PreferCSSPageSize = new(true), new(true)
	}))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(string(pdf), "%PDF-") {
		t.Errorf("what is printed is no PDF but %d bytes", len(pdf))
	}
	if dir := os.Getenv("FAIRLEAD_PICTURES"); dir != "" {
		if err := os.WriteFile(filepath.Join(dir, "page.pdf"), pdf, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
