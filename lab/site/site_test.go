package main

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"

	"fairlead.dev/fairlead/lab/browser"
	"fairlead.dev/fairlead/lab/lack"
)

const repository = "../.."

// tools is the directory of the generator's programs and libraries, which ./dev site installs.
func tools(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("FAIRLEAD_SITE_TOOLS")
	if dir == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			t.Fatal(err)
		}
		requirements, err := os.ReadFile("requirements.txt")
		if err != nil {
			t.Fatal(err)
		}
		dir = filepath.Join(cache, "fairlead", fmt.Sprintf("site-%x", sha256.Sum256(requirements))[:len("site-")+16])
	}
	if _, err := os.Stat(filepath.Join(dir, "bin/mkdocs")); err != nil {
		lack.Skip(t, lack.SiteTools, err)
	}
	if _, err := exec.LookPath("dot"); err != nil {
		lack.Skip(t, lack.SiteTools, err)
	}
	return dir
}

// build makes the site. The generator fails if a page links to a page or heading that is not there.
func build(t *testing.T, tools string) string {
	t.Helper()
	source, out := t.TempDir(), t.TempDir()
	if err := prepare(repository, source); err != nil {
		t.Fatal(err)
	}
	mkdocs := exec.Command(filepath.Join(tools, "bin/mkdocs"), "build", "-q", "-f", filepath.Join(source, "mkdocs.yml"), "-d", out)
	if said, err := mkdocs.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	return out
}

// site is a built site that a browser visits.
type site struct {
	browser context.Context
	url     string
	axe     string // the accessibility checker's script
}

// TestSite visits each page of the site in a browser.
func TestSite(t *testing.T) {
	programs := tools(t)
	out := build(t, programs)
	checkers, err := filepath.Glob(filepath.Join(programs, "lib/*/site-packages/axe_playwright_python/axe.min.js"))
	if err != nil || len(checkers) != 1 {
		t.Fatal("axe.min.js is not there:", checkers, err)
	}
	axe, err := os.ReadFile(checkers[0])
	if err != nil {
		t.Fatal(err)
	}
	s := site{browser.Start(t), serve(t, out), string(axe) + `;const inFull = ["/index.html", "/choosing.html", "/troubleshooting.html"];`}
	pages := pagesOf(t, out)
	t.Run("pages", func(t *testing.T) { s.visit(t, pages) })
	dark := site{s.browser, serve(t, out), s.axe} // of another origin, for which the browser has stored no light colours
	t.Run("in dark colours", dark.dark)
	t.Run("is searched", s.search)
}

// serve serves a directory, and returns its URL.
func serve(t *testing.T, dir string) string {
	t.Helper()
	server := httptest.NewServer(http.FileServer(http.Dir(dir)))
	t.Cleanup(server.Close)
	return server.URL
}

// pagesOf are the paths of a site's pages, but for what a study wrote as a page of its own.
func pagesOf(t *testing.T, out string) (pages []string) {
	t.Helper()
	err := fs.WalkDir(os.DirFS(out), ".", func(path string, _ fs.DirEntry, err error) error {
		if strings.HasSuffix(path, ".html") && path != "404.html" && !strings.HasPrefix(path, "benchmark/") {
			pages = append(pages, path)
		}
		return err
	})
	if err != nil || len(pages) < 10 {
		t.Fatal("pages:", pages, err)
	}
	return pages
}

// tab is a tab of the browser. It collects what a page that works never does.
type tab struct {
	t    *testing.T
	site site
	ctx  context.Context
	mu   sync.Mutex
	said []string
}

func (s site) tab(t *testing.T, steps ...browser.Step) *tab {
	t.Helper()
	b := &tab{t: t, site: s}
	ctx, cancel := chromedp.NewContext(s.browser, chromedp.WithListener(b.hear))
	t.Cleanup(cancel)
	b.ctx = ctx
	b.do(browser.Command(network.Enable, network.EnableParams{}))
	b.do(steps...)
	return b
}

func (b *tab) hear(event any) {
	said := ""
	switch e := event.(type) {
	case *network.EventRequestWillBeSent:
		if u, err := url.Parse(e.Request.URL); err != nil || u.Host != "" && "http://"+u.Host != b.site.url {
			said = "a request to another host: " + e.Request.URL
		}
	case *network.EventResponseReceived:
		if e.Response.Status >= 400 {
			said = fmt.Sprintf("%s: %d", e.Response.URL, e.Response.Status)
		}
	default:
		said = browser.Complaint(event)
	}
	if said != "" {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.said = append(b.said, said)
	}
}

func (b *tab) do(steps ...browser.Step) {
	b.t.Helper()
	if err := chromedp.Do(b.ctx, steps...); err != nil {
		b.t.Fatal(err)
	}
}

// open shows a page.
func (b *tab) open(page string) {
	b.t.Helper()
	b.do(chromedp.Navigate(b.site.url + "/" + page))
}

// none fails with the lines that a script returns about a page.
func (b *tab) none(page, what, script string) {
	b.t.Helper()
	if found := b.lines(script); len(found) > 0 {
		b.t.Errorf("%s: %s:\n%s", page, what, strings.Join(found, "\n"))
	}
}

func (b *tab) lines(script string) []string {
	b.t.Helper()
	wait := func(p *runtime.EvaluateParams) { p.AwaitPromise = new(true) }
	found, err := chromedp.Run(b.ctx, chromedp.Evaluate[[]string]("(async () => {"+script+"})()", wait))
	if err != nil {
		b.t.Fatal(err)
	}
	return found
}

// quiet fails if a page has asked another host for something, or complained.
func (b *tab) quiet(page string) {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.said) > 0 {
		b.t.Errorf("%s is not quiet:\n%s", page, strings.Join(b.said, "\n"))
	}
	b.said = nil
}

// shot keeps a picture where FAIRLEAD_PICTURES says, for people to look at.
func (b *tab) shot(name string) {
	b.t.Helper()
	dir := os.Getenv("FAIRLEAD_PICTURES")
	if dir == "" {
		return
	}
	picture, err := chromedp.Run(b.ctx, chromedp.FullScreenshot(100))
	if err != nil {
		b.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, strings.TrimSuffix(name, ".html")+".png"), picture, 0o644); err != nil {
		b.t.Fatal(err)
	}
}

// headings are what is wrong with the order of headings: one of the first level, and none that skips a level.
const headings = `
const levels = [...document.querySelectorAll("article h1, article h2, article h3, article h4")].map((h) => Number(h.tagName[1]));
return levels.filter((l) => l === 1).length !== 1 ? [levels.filter((l) => l === 1).length + " of the first level"] :
  levels.flatMap((l, i) => i > 0 && l > levels[i - 1] + 1 ? ["heading " + i + " of level " + l + " after " + levels[i - 1]] : []);`

// accessible has the checker look for what people with a screen reader, or poor sight, meet. It sees the frame of a page,
// and colours, which take most of its time, on the pages of inFull alone: others have the same.
const accessible = `
const full = inFull.includes(location.pathname);
const found = await axe.run(full ? document : "article", {
  resultTypes: ["violations"],
  runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"],
  rules: {"color-contrast": {enabled: full}},
});
return found.violations.flatMap((v) => v.nodes.slice(0, 3).map((n) => v.id + ": " + n.target + ": " + n.failureSummary));`

// targets are the links of a page to the site itself, and its anchors: "#" and a name.
const targets = `
const links = [...document.querySelectorAll("a[href]")].map((a) => a.href).filter((h) => h.startsWith(location.origin));
return [...new Set(links)].concat([...document.querySelectorAll("[id]")].map((e) => "#" + e.id));`

// visit opens each page, and checks it by itself and its links.
func (s site) visit(t *testing.T, pages []string) {
	b := s.tab(t, chromedp.EmulateViewport(1400, 900))
	anchors, links := map[string]bool{}, map[string]string{}
	for _, page := range pages {
		b.open(page)
		b.shot("wide-" + page)
		b.none(page, "headings", headings)
		b.none(page, "access", s.axe+accessible)
		anchors[s.url+"/"+page] = true
		for _, target := range b.lines(targets) {
			if strings.HasPrefix(target, "#") {
				anchors[s.url+"/"+page+target] = true
			} else {
				links[target] = page
			}
		}
		b.fits(page)
		b.quiet(page)
	}
	for link, page := range links {
		if file, _, _ := strings.Cut(link, "#"); !anchors[link] && !s.fetched(t, file, anchors[file]) {
			t.Errorf("%s links to %s, which is not there", page, link)
		}
	}
}

// fetched reports whether a file is there that is no page which was visited.
func (s site) fetched(t *testing.T, file string, visited bool) bool {
	t.Helper()
	if visited {
		return false
	}
	response, err := http.Get(file)
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	return response.StatusCode == http.StatusOK
}

// dark checks the colours of a page with tables, code and diagrams where the system prefers dark ones.
func (s site) dark(t *testing.T) {
	b := s.tab(t, chromedp.EmulateViewport(1400, 900), browser.Command(emulation.SetEmulatedMedia,
		emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: "dark"}}}))
	for _, page := range []string{"choosing.html", "troubleshooting.html"} {
		b.open(page)
		b.shot("dark-" + page)
		b.none(page, "access", s.axe+accessible)
		b.none(page, "colours", `return document.body.dataset.mdColorScheme === "slate" ? [] : ["are light"];`)
	}
}

// fits checks that a page fits on a phone: what is wider scrolls in a box of its own.
func (b *tab) fits(page string) {
	b.t.Helper()
	b.do(chromedp.EmulateViewport(400, 800, chromedp.EmulateMobile))
	b.shot("phone-" + page)
	b.none(page, "width on a phone", `return document.documentElement.scrollWidth > 400 ? ["the page scrolls sideways"] : [];`)
	b.do(chromedp.EmulateViewport(1400, 900))
}

// search finds a page by a word in it, without another host's help.
func (s site) search(t *testing.T) {
	b := s.tab(t, chromedp.EmulateViewport(1400, 900))
	b.open("index.html")
	found := b.lines(`
const input = document.querySelector(".md-search__input");
document.querySelector("[data-md-toggle=search]").click();
input.focus(); input.value = "loadBalancerSourceRanges"; input.dispatchEvent(new Event("input", {bubbles: true}));
for (let i = 0; i < 100 && !document.querySelector(".md-search-result__link"); i++) await new Promise((r) => setTimeout(r, 100));
return [...document.querySelectorAll(".md-search-result__link")].map((a) => a.pathname);`)
	b.shot("search")
	if !slices.Contains(found, "/troubleshooting.html") {
		t.Errorf("found: %q", found)
	}
	b.quiet("search")
}
