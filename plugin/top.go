package plugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/gdamore/tcell/v2"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/service"
)

func topCommand() *cobra.Command {
	var q serviceQuestion
	c := &cobra.Command{
		Use:   "top",
		Short: "show the Services live in the terminal, by connections, failures or endpoints",
		Long: "top shows each port of a Service, and every two seconds its new connections and failures a second.\n\n" +
			"  c, f, e, n  sort by connections, failures, endpoints that are not ready, name\n" +
			"  /           show only names with a text; Enter keeps it, Esc shows all\n" +
			"  ↑ ↓ PgUp PgDn Home End   move\n" +
			"  q           end\n\n" +
			"Where there is no terminal, use fairlead services --watch.",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if !term.IsTerminal(int(os.Stdout.Fd())) || !term.IsTerminal(int(os.Stdin.Fd())) {
				return cli.Misused(errors.New("top needs a terminal; use fairlead services --watch"))
			}
			screen, err := tcell.NewScreen()
			if err == nil {
				err = screen.Init()
			}
			if err != nil {
				return cli.Failed(fmt.Errorf("open the terminal: %w", err))
			}
			defer screen.Fini()
			ask := func(ctx context.Context) (engine.Services, error) { return q.services(ctx, q.about(nil)) }
			return newTop(screen, ask).run(c.Context())
		},
	}
	q.addTo(c)
	c.Flags().Lookup("output").Hidden = true
	return c
}

// top is a screen of Services.
type top struct {
	screen tcell.Screen
	ask    func(context.Context) (engine.Services, error)

	all    engine.Services
	failed error // why all is not new
	rows   []*topRow
	known  map[string]*topRow
	order  rune // the key that chose it
	filter string
	typing bool
	first  int // row on the screen
}

// topRow is a port of a Service.
type topRow struct {
	name            string
	port            service.PortSummary
	seen            bool // twice: the rates are known
	rate, failures  float64
	connections, to uint64 // and attempts that failed, at the last look
}

func newTop(s tcell.Screen, ask func(context.Context) (engine.Services, error)) *top {
	return &top{screen: s, ask: ask, known: map[string]*topRow{}, order: 'c'}
}

// answered is what the proxy has said.
type answered struct {
	all engine.Services
	err error
}

// run shows the Services until a key or the context ends it.
func (t *top) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	events, answers := make(chan tcell.Event), make(chan answered)
	go t.screen.ChannelEvents(events, ctx.Done())
	go func() {
		next := time.NewTicker(watchEvery)
		defer next.Stop()
		for ctx.Err() == nil {
			all, err := t.ask(ctx)
			select {
			case answers <- answered{all, err}:
			case <-ctx.Done():
			}
			select {
			case <-next.C:
			case <-ctx.Done():
			}
		}
	}()
	for {
		t.draw()
		select {
		case <-ctx.Done():
			return cli.Exit(cli.ExitInterrupted, nil)
		case a := <-answers:
			t.take(a)
		case e := <-events:
			switch e := e.(type) {
			case *tcell.EventResize:
				t.screen.Sync()
			case *tcell.EventKey:
				if e.Key() == tcell.KeyCtrlC {
					return cli.Exit(cli.ExitInterrupted, nil)
				}
				if t.key(e) {
					return nil
				}
			}
		}
	}
}

// take computes the rates since the last answer.
func (t *top) take(a answered) {
	if t.failed = a.err; a.err != nil {
		return
	}
	span := a.all.Now.Sub(t.all.Now).Seconds()
	t.all, t.rows = a.all, nil
	known := map[string]*topRow{}
	for _, s := range a.all.Services {
		for _, p := range s.Ports {
			r := &topRow{name: s.Service + " " + portText(p), port: p, connections: p.Connections, to: p.Failed}
			if was := t.known[r.name]; was != nil && span > 0 {
				r.seen = true
				r.rate = float64(max(was.connections, p.Connections)-was.connections) / span
				r.failures = float64(max(was.to, p.Failed)-was.to) / span
			}
			known[r.name] = r
			t.rows = append(t.rows, r)
		}
	}
	t.known = known
}

// key does what a key says, and reports whether it is the end.
func (t *top) key(e *tcell.EventKey) (end bool) {
	_, height := t.screen.Size()
	page := max(1, height-topLines)
	switch e.Key() {
	case tcell.KeyEscape:
		t.filter, t.typing = "", false
	case tcell.KeyEnter:
		t.typing = false
	case tcell.KeyBackspace, tcell.KeyBackspace2:
		if letters := []rune(t.filter); t.typing && len(letters) > 0 {
			t.filter = string(letters[:len(letters)-1])
		}
	case tcell.KeyUp:
		t.first--
	case tcell.KeyDown:
		t.first++
	case tcell.KeyPgUp:
		t.first -= page
	case tcell.KeyPgDn:
		t.first += page
	case tcell.KeyHome:
		t.first = 0
	case tcell.KeyEnd:
		t.first = len(t.rows)
	case tcell.KeyRune:
		switch r := e.Rune(); {
		case t.typing:
			t.filter += string(r)
		case r == 'q':
			return true
		case r == '/':
			t.typing, t.filter = true, ""
		case strings.ContainsRune("cfen", r):
			t.order = r
		}
	}
	return false
}

// shown are the rows that the filter lets through, in order.
func (t *top) shown() []*topRow {
	rows := slices.DeleteFunc(slices.Clone(t.rows), func(r *topRow) bool { return !strings.Contains(r.name, t.filter) })
	slices.SortFunc(rows, func(a, b *topRow) int {
		by := 0
		switch t.order {
		case 'c':
			by = cmp.Or(cmp.Compare(b.rate, a.rate), cmp.Compare(b.connections, a.connections))
		case 'f':
			by = cmp.Or(cmp.Compare(b.failures, a.failures), cmp.Compare(b.to, a.to))
		case 'e':
			by = cmp.Compare(b.port.Draining+b.port.Excluded, a.port.Draining+a.port.Excluded)
		}
		return cmp.Or(by, strings.Compare(a.name, b.name))
	})
	return rows
}

// topLines are those of the screen that are not rows.
const topLines = 3

func (t *top) draw() {
	width, height := t.screen.Size()
	t.screen.Clear()
	rows, page := t.shown(), max(1, height-topLines)
	t.first = max(0, min(t.first, len(rows)-page))
	last := min(len(rows), t.first+page)
	orders := map[rune]string{'c': "connections", 'f': "failures", 'e': "endpoints not ready", 'n': "name"}
	head := fmt.Sprintf("data plane %s, %d of %d rows, by %s", t.all.Plane, len(rows), len(t.rows), orders[t.order])
	switch {
	case t.failed != nil:
		head = t.failed.Error()
	case t.all.Now.IsZero():
		head = "asking the proxy …"
	case !t.all.Counts:
		head += "; it counts no connections"
	}
	t.line(0, width, tcell.StyleDefault.Bold(true), head)
	name := max(20, width-52)
	header := fmt.Sprintf("%-*s %8s %8s %10s  %s", name, "SERVICE", "CONN/S", "FAIL/S", "TOTAL", "ENDPOINTS")
	t.line(1, width, tcell.StyleDefault.Reverse(true), header)
	for i, r := range rows[t.first:last] {
		rate, failures := "–", "–"
		if r.seen {
			rate, failures = fmt.Sprintf("%.1f", r.rate), fmt.Sprintf("%.1f", r.failures)
		}
		t.line(2+i, width, tcell.StyleDefault, fmt.Sprintf("%-*s %8s %8s %10d  %s", name, clip(r.name, name), rate, failures,
			r.connections, endpointText(r.port)))
	}
	foot := "c f e n: sort   /: filter   q: end"
	if t.typing || t.filter != "" {
		foot = "filter: " + t.filter
	}
	t.line(height-1, width, tcell.StyleDefault.Dim(true), foot)
	t.screen.Show()
}

func (t *top) line(y, width int, style tcell.Style, text string) {
	t.screen.PutStrStyled(0, y, clip(text, width), style)
}

// clip shortens a text to a number of letters.
func clip(text string, n int) string {
	if letters := []rune(text); len(letters) > n {
		return string(letters[:max(0, n-1)]) + "…"
	}
	return text
}
