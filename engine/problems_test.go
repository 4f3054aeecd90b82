package engine

import (
	"fmt"
	"strings"
	"testing"

	"fairlead.dev/fairlead/service"
)

// A namespace with very many problems does not hide those of others, and what is right again is not shown.
func TestProblems(t *testing.T) {
	p := newProblems()
	var many []service.Problem
	for i := range 5000 {
		many = append(many, service.Problem{Object: fmt.Sprintf("Service evil/s%04d", i), Field: "spec", Reason: "is refused"})
	}
	none := func(string) []service.Problem { return nil }
	p.note(&service.Batch{}, many, nil, none)
	one := service.Problem{Object: "Service shop/web", Field: "spec.ports[0]", Reason: "is no port"}
	p.note(&service.Batch{}, []service.Problem{one, {Object: "evil.yaml", Reason: "cannot be read"}}, nil, none)
	check := func(want string) {
		t.Helper()
		var lines []string
		for _, problem := range p.list {
			lines = append(lines, problem.Object)
		}
		if got := strings.Join(lines, ", "); got != want {
			t.Errorf("shown are %s, should be %s", got, want)
		}
	}
	check("evil.yaml, Service evil/s0000, Service evil/s0001, Service evil/s0002, Service shop/web")
	if n := len(p.kept["evil"]); n > maxKept {
		t.Errorf("%d are kept of one namespace", n)
	}
	changed := service.Batch{Services: service.One(service.Name{Namespace: "evil", Name: "s0000"}, &service.Service{})}
	p.note(&changed, nil, nil, func(string) []service.Problem { return many[:1] })
	check("evil.yaml, Service evil/s0000, Service evil/s0001, Service evil/s0002, Service shop/web")
	p.note(&changed, nil, nil, none)
	p.note(&service.Batch{}, nil, []string{"Service shop/web"}, none)
	check("evil.yaml, Service evil/s0001, Service evil/s0002, Service evil/s0003")
}
