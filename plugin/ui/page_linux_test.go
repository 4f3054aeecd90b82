package ui

import (
	"context"
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/lab/browser"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/recorder"
	"fairlead.dev/fairlead/service"
)

// chromium is a running one.
type chromium struct{ ctx context.Context }

func start(t testing.TB) chromium { return chromium{browser.Start(t)} }

// window is a tab that shows the page of an agent.
type window struct {
	testing.TB
	agent *fake
	ctx   context.Context
	mu    sync.Mutex
	said  []string // what a page that works never does
	loads int      // of documents
}

func (b chromium) show(t testing.TB, f *fake, before ...browser.Step) *window {
	t.Helper()
	server := httptest.NewServer(f.handler("127.0.0.1"))
	t.Cleanup(server.Close)
	w := &window{TB: t, agent: f}
	ctx, cancel := chromedp.NewContext(b.ctx, chromedp.WithListener(func(event any) { w.hear(event, server.URL) }))
	t.Cleanup(cancel)
	w.ctx = ctx
	w.run(browser.Command(network.Enable, network.EnableParams{}))
	w.run(before...)
	w.run(chromedp.Navigate(server.URL))
	return w
}

func (w *window) hear(event any, server string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch e := event.(type) {
	case *network.EventRequestWillBeSent:
		if e.Type == network.ResourceTypeDocument && e.Request.URL != "about:blank" {
			w.loads++
		}
		if !strings.HasPrefix(e.Request.URL, server+"/") && e.Request.URL != "data:," && e.Request.URL != "about:blank" {
			w.said = append(w.said, "request: "+e.Request.URL)
		}
	default:
		if text := browser.Complaint(event); text != "" {
			w.said = append(w.said, text)
		}
	}
}

// quiet fails if the page was loaded again, has asked another host or complained.
func (w *window) quiet() {
	w.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.said) > 0 || w.loads != 1 {
		w.Errorf("%d documents were loaded; the page is not quiet:\n%s", w.loads, strings.Join(w.said, "\n"))
	}
}

func (w *window) run(steps ...browser.Step) {
	w.Helper()
	if err := chromedp.Do(w.ctx, steps...); err != nil {
		w.Fatal(err)
	}
}

func (w *window) press(keys ...string) {
	w.Helper()
	for _, key := range keys {
		w.run(chromedp.KeyEvent(key))
	}
}

// lines is what a function in the page returns: an array of texts.
func (w *window) lines(script string) string {
	w.Helper()
	got, err := chromedp.Run(w.ctx, chromedp.Evaluate[[]string](`(() => {
		const all = (s, e = document) => [...e.querySelectorAll(s)];
		const visible = (e) => e.getClientRects().length > 0 && !e.closest(".sr");
		const name = (e) => (e.tagName + "." + e.className + " " + e.textContent).slice(0, 90).trim();
		`+script+"})()"))
	if err != nil {
		w.Fatal(err)
	}
	return strings.Join(got, "\n")
}

// becomes waits until a function in the page returns these lines.
func (w *window) becomes(what, script string, want ...string) {
	w.Helper()
	eventually.Equal(w, what, strings.Join(want, "\n"), func() string { return w.lines(script) })
}

// shot keeps a picture of the page where FAIRLEAD_PICTURES says, for people to look at.
func (w *window) shot(name string) {
	w.Helper()
	dir := os.Getenv("FAIRLEAD_PICTURES")
	if dir == "" {
		return
	}
	picture, err := chromedp.Run(w.ctx, chromedp.CaptureScreenshot())
	if err != nil {
		w.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "ui-"+name+".png"), picture, 0o644); err != nil {
		w.Fatal(err)
	}
}

const (
	cells    = `return all("#rows > .row").map((r) => all("th, td", r).map((c) => c.textContent.trim()).join(" | "));`
	services = `return all("#rows .toggle").map((b) => b.textContent);`
	listed   = `return all("#rows .detail tbody tr").map((r) => [...r.children].map((c) => c.textContent).join(" | "));`
	alarms   = `return all("#alarms li").filter(visible).map((l) => l.textContent);`
	focus    = `return [document.activeElement.tagName + " " + document.activeElement.textContent];`
)

func TestPage(t *testing.T) {
	t.Parallel()
	b := start(t)
	for name, test := range map[string]func(*testing.T){
		"live": b.live, "keys": b.keys, "absent": b.absent, "hostile": b.hostile, "looks": b.looks,
	} {
		t.Run(name, test)
	}
}

// live shows a Service, its endpoints, and what changes.
func (b chromium) live(t *testing.T) {
	f := of("shop/cart", "a/web")
	w := b.show(t, f)
	w.becomes("the rows", cells, "a/web | http 80/tcp | 10.96.0.10:80 | 1 ready1 draining | 0 | 0 | 60 min ago",
		"shop/cart | http 80/tcp | 10.96.0.10:80 | 1 ready1 draining | 0 | 0 | 60 min ago")
	w.run(chromedp.Click(chromedp.CSS("#rows .toggle")))
	w.becomes("the endpoints", listed, "10.244.0.2:8080 |  | draining | is terminating |  | 0, 0.0 %",
		"10.244.0.1:8080 |  | ready |  | 100.0 % | 30, 75.0 %")
	f.edit("a/web", func(_ *engine.ServiceReport, p *service.PortSummary) {
		p.Endpoints = []service.EndpointState{{At: "10.244.0.9:8080", Node: "n", State: service.Ready, Weight: 100}}
		p.Draining = 0
	})
	f.change(func() {
		f.events = []recorder.Event{{Time: time.Now(), Kind: recorder.Left, Service: "a/web", Message: "2 backends left"}}
	})
	w.becomes("the endpoints that came", listed, "10.244.0.9:8080 | n | ready |  | 100.0 % | 0, 0.0 %")
	w.becomes("the event", `return all("#events li").map((l) => l.textContent.replace(/^.*left a/, "left a"));`,
		"left a/web 2 backends left")
	f.change(func() { f.alarms = []string{"Service shop/cart: spec.ports[0]: it is bad"} })
	f.edit("shop/cart", func(s *engine.ServiceReport, _ *service.PortSummary) {
		s.Problems = []service.Problem{{Object: "Service shop/cart", Reason: "it is bad"}}
	})
	w.becomes("the problem", alarms, "Service shop/cart: spec.ports[0]: it is bad")
	w.becomes("its Service stands first", services, "shop/cart", "a/web")
	w.becomes("the other one is still open", listed, "10.244.0.9:8080 | n | ready |  | 100.0 % | 0, 0.0 %")
	f.change(func() { delete(f.services, "shop/cart"); f.alarms = nil })
	w.becomes("it is deleted", services, "a/web")
	w.becomes("no problem", alarms)
	w.quiet()
}

// keys uses the page without a mouse. An element keeps the focus when rows move.
func (b chromium) keys(t *testing.T) {
	f := of()
	for i := range 150 {
		f.services[fmt.Sprintf("ns/s%03d", i)] = made(fmt.Sprintf("ns/s%03d", i))
	}
	w := b.show(t, f)
	count := `return [String(all("#rows .row").length), document.getElementById("where").textContent];`
	w.becomes("a page", count, "100", "page 1 of 2, 150 ports")
	w.run(chromedp.Focus(chromedp.CSS("#next")), chromedp.KeyEvent(kb.Enter))
	w.becomes("the other page", count, "50", "page 2 of 2, 150 ports")
	w.run(chromedp.Focus(chromedp.CSS("#filter")))
	w.press("s", "1", "4")
	w.becomes("those that match", count, "10", "page 1 of 1, 10 ports")
	w.press(kb.Tab, kb.Tab, kb.Enter)
	w.becomes("the first row has the focus", focus, "BUTTON ns/s140")
	w.becomes("it is open", `return all("[aria-expanded=true]").map((e) => e.textContent);`, "ns/s140")
	f.edit("ns/s149", func(_ *engine.ServiceReport, p *service.PortSummary) { p.Ready = 0 })
	w.becomes("another one is first", `return all("#rows .toggle").slice(0, 2).map((b) => b.textContent);`, "ns/s149", "ns/s140")
	w.becomes("the focus stays", focus, "BUTTON ns/s140")
	w.press(kb.Enter)
	w.becomes("it is closed", `return all("[aria-expanded=true], .detail").map((e) => e.textContent);`)
	w.quiet()
}

// absent shows that no agent runs, and follows the one that starts.
func (b chromium) absent(t *testing.T) {
	f := of("shop/cart")
	f.absent = true
	w := b.show(t, f)
	said := `return [document.getElementById("live").textContent.replace(/[0-9:]{8}/, "TIME")];`
	w.becomes("no agent", said, "No answer of the agent: no proxy listens on /run/x")
	w.becomes("no rows", `return [document.getElementById("none").textContent];`, "Nothing is known.")
	f.change(func() { f.absent = false })
	w.becomes("the agent", said, "live, TIME")
	w.becomes("the rows", services, "shop/cart")
	f.change(func() { f.absent = true })
	w.becomes("the agent is gone", said, "No answer of the agent: no proxy listens on /run/x. What follows is of TIME")
	w.becomes("what was known", services, "shop/cart")
	w.quiet()
}

// hostile has texts of tenants that would be HTML.
func (b chromium) hostile(t *testing.T) {
	const text = `<img src=x onerror=console.log(1)><script>console.log(2)</script>`
	f := of("shop/cart")
	f.alarms = []string{text}
	f.events = []recorder.Event{{Time: time.Now(), Kind: recorder.Error, Message: text, Details: map[string]string{"object": text}}}
	f.edit("shop/cart", func(s *engine.ServiceReport, p *service.PortSummary) {
		s.Problems = []service.Problem{{Object: text, Reason: text}}
		p.Endpoints = []service.EndpointState{{At: text, State: service.Draining, Reason: text}}
	})
	w := b.show(t, f)
	w.becomes("the alarm is a text", alarms, text)
	w.run(chromedp.Click(chromedp.CSS("#rows .toggle")))
	w.becomes("the event is a text", `return all("#events li").map((l) => l.textContent.slice(15));`, text+" object="+text)
	w.becomes("the reason is a text", listed, text+" |  | draining | "+text+" |  | 0, 0.0 %")
	w.becomes("elements", `return all("img, #rows script, #events script").map(name);`)
	w.quiet()
}

// many is an agent with all that the page can show.
func many(n int) *fake {
	f := of()
	for i := range n {
		name := fmt.Sprintf("team-%02d/service-%05d", i%40, i)
		f.services[name] = made(name)
		f.edit(name, func(s *engine.ServiceReport, p *service.PortSummary) {
			p.Ready, p.Draining, p.Addresses[0].At = 3+i%9, i%17/16, fmt.Sprintf("10.96.%d.%d:80", i/250, i%250)
			switch i {
			case 3:
				p.Ready, p.Excluded = 0, 4
			case 5:
				s.Problems = []service.Problem{{Object: "Service " + name, Field: "spec.externalIPs[0]", Reason: "Service a/b has 192.0.2.7:80"}}
			case 7:
				s.Ignored = "it has the label service.kubernetes.io/service-proxy-name"
			}
		})
	}
	f.alarms = []string{"configuration refused, the one before stays: bindAddress: \"nonsense\" is no address",
		"Service team-05/service-00005: spec.externalIPs[0]: Service a/b has 192.0.2.7:80"}
	for i := range 30 {
		f.events = append(f.events, recorder.Event{Time: time.Now(), Kind: []recorder.Kind{recorder.Rows, recorder.Left, recorder.Joined,
			recorder.Problem}[i%4], Service: fmt.Sprintf("team-%02d/service-%05d", i, i), Message: "2 backends (10.244.1.17:8080, 10.244.2.9:8080)",
			Details: map[string]string{"took": "412µs"}})
	}
	return f
}

// looks holds colours, widths and names against what people need.
func (b chromium) looks(t *testing.T) {
	for name, c := range map[string]struct {
		width  int64
		scheme string
	}{"light": {1440, "light"}, "dark": {1440, "dark"}, "narrow": {360, "light"}, "tablet": {800, "dark"}} {
		t.Run(name, func(t *testing.T) {
			w := b.show(t, many(300), chromedp.EmulateViewport(c.width, 900), browser.Command(emulation.SetEmulatedMedia,
				emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: c.scheme}}}))
			w.becomes("a problem stands first", `return all("#rows .toggle").slice(0, 2).map((b) => b.textContent);`,
				"team-05/service-00005", "team-03/service-00003")
			w.run(chromedp.Click(chromedp.CSS("#rows .toggle")))
			w.becomes("the endpoints", `return [String(all("#rows .detail tbody tr").length)];`, "2")
			w.becomes("no rate", `return all("#rows .n").filter((c) => c.textContent === "…").map(name);`)
			w.shot(name)
			w.becomes("what is too wide", `const wide = document.documentElement.clientWidth;
				return (document.documentElement.scrollWidth > wide ? ["the page scrolls"] : []).concat(all("body *").filter((e) =>
				visible(e) && e.getBoundingClientRect().right > wide + 1).map(name));`)
			w.becomes("low contrast", lowContrast)
			w.becomes("what has no name", unlabelled)
			w.quiet()
		})
	}
}

// lowContrast are texts with less than 4.5:1.
const lowContrast = `
const light = (c) => { const [r, g, b] = c.match(/[\d.]+/g).map(Number).map((v) => v / 255).map((v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b; };
const behind = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
  if (!c.startsWith("rgba(0, 0, 0, 0")) return c; } return "rgb(255, 255, 255)"; };
const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + .05) / (y + .05); };
return all("body *").filter((e) => visible(e) && !e.disabled && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())).flatMap((e) => {
  const r = ratio(getComputedStyle(e).color, behind(e)); return r < 4.5 ? [r.toFixed(2) + " " + name(e)] : []; });`

// unlabelled are the elements that a screen reader cannot name.
const unlabelled = `
return all("input, select, section, aside, ul, ol").filter((e) => !(e.labels?.length > 0 || e.getAttribute("aria-label") ||
    document.getElementById(e.getAttribute("aria-labelledby"))?.textContent.trim())).map((e) => "no name: " + name(e))
  .concat(all("table").filter((t) => !t.caption || !t.querySelector("th[scope]")).map(name), all("button").filter((b) => !b.textContent.trim()).map(name))
  .concat(document.documentElement.lang === "en" && all("h1").length === 1 && all("main").length === 1 ? [] : ["no landmarks"]);`

// BenchmarkPage opens the page of 10,000 Services: until something is painted, and until rows are.
func BenchmarkPage(b *testing.B) {
	running := start(b)
	f := many(10_000)
	var painted, filled float64
	for b.Loop() {
		w := running.show(b, f)
		w.becomes("rows", `return [String(all("#rows .row").length)];`, "100")
		times, err := chromedp.Run(w.ctx, chromedp.Evaluate[[]float64](`(() => [
			performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? 0,
			performance.getEntriesByType("resource").find((e) => e.name.includes("state?")).responseEnd])()`))
		if err != nil {
			b.Fatal(err)
		}
		painted, filled = painted+times[0], filled+times[1]
	}
	b.ReportMetric(painted/float64(b.N), "ms-to-first-paint")
	b.ReportMetric(filled/float64(b.N), "ms-to-rows")
	b.ReportMetric(0, "ns/op")
}
