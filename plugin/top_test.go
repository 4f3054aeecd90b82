package plugin

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/gdamore/tcell/v2"

	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/service"
)

// text is what stands on a simulated screen.
func text(s tcell.SimulationScreen) string {
	cells, width, _ := s.GetContents()
	var b strings.Builder
	for i, c := range cells {
		b.WriteString(string(c.Runes))
		if (i+1)%width == 0 {
			b.WriteString("\n")
		}
	}
	lines := strings.Split(b.String(), "\n")
	for i := range lines {
		lines[i] = strings.TrimRight(lines[i], " ")
	}
	return strings.TrimRight(strings.Join(lines, "\n"), "\n")
}

// after is the proxy's after some seconds: each Service has its number of connections in each of them.
func after(seconds int) answered {
	all := engine.Services{Now: time.Unix(int64(1000+seconds), 0), Plane: "userspace", Counts: true}
	for i, name := range []string{"shop/cart", "shop/web", "lab/db"} {
		p := service.PortSummary{Name: "http", Port: "80/tcp", Ready: 2, Excluded: i}
		p.Connections, p.Failed = uint64(seconds*(i+1)), uint64(seconds*(2-i))
		all.Services = append(all.Services,
			engine.ServiceReport{Summary: service.Summary{Service: name, Ports: []service.PortSummary{p}}})
	}
	return answered{all: all}
}

func TestTop(t *testing.T) {
	s := tcell.NewSimulationScreen("UTF-8")
	if err := s.Init(); err != nil {
		t.Fatal(err)
	}
	defer s.Fini()
	s.SetSize(80, 8)
	top := newTop(s, nil)
	shows := func(want string) {
		t.Helper()
		top.draw()
		if got := text(s); got != strings.Trim(want, "\n") {
			t.Errorf("the screen has\n%s\nnot\n%s", got, want)
		}
	}
	press := func(keys string) {
		for _, r := range keys {
			top.key(tcell.NewEventKey(tcell.KeyRune, r, tcell.ModNone))
		}
	}
	shows("asking the proxy …" + `
SERVICE                        CONN/S   FAIL/S      TOTAL  ENDPOINTS





c f e n: sort   /: filter   q: end`)
	top.take(after(0))
	top.take(after(10))
	shows(`
data plane userspace, 3 of 3 rows, by connections
SERVICE                        CONN/S   FAIL/S      TOTAL  ENDPOINTS
lab/db http 80/tcp                3.0      0.0         30  2 ready, 2 excluded
shop/web http 80/tcp              2.0      1.0         20  2 ready, 1 excluded
shop/cart http 80/tcp             1.0      2.0         10  2 ready


c f e n: sort   /: filter   q: end`)
	press("f/shop")
	shows(`
data plane userspace, 2 of 3 rows, by failures
SERVICE                        CONN/S   FAIL/S      TOTAL  ENDPOINTS
shop/cart http 80/tcp             1.0      2.0         10  2 ready
shop/web http 80/tcp              2.0      1.0         20  2 ready, 1 excluded



filter: shop`)
	top.take(answered{err: errors.New("no proxy listens")})
	top.draw()
	if !strings.HasPrefix(text(s), "no proxy listens\n") {
		t.Errorf("the screen does not say that no proxy answers:\n%s", text(s))
	}
}

// TestTop_run: q and the end of the context end it.
func TestTop_run(t *testing.T) {
	for _, byKey := range []bool{true, false} {
		t.Run(fmt.Sprint(byKey), func(t *testing.T) {
			s := tcell.NewSimulationScreen("UTF-8")
			if err := s.Init(); err != nil {
				t.Fatal(err)
			}
			defer s.Fini()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			asked := make(chan struct{}, 1)
			top := newTop(s, func(context.Context) (engine.Services, error) {
				select {
				case asked <- struct{}{}:
				default:
				}
				return after(0).all, nil
			})
			done := make(chan error)
			go func() { done <- top.run(ctx) }()
			<-asked
			if byKey {
				s.InjectKey(tcell.KeyRune, 'q', tcell.ModNone)
			} else {
				cancel()
			}
			if err := <-done; (err == nil) != byKey {
				t.Errorf("it ends with %v", err)
			}
		})
	}
}
