package demo

import "encoding/json"

// way is a trial for machines.
type way struct {
	Service  string         `json:"service"` // namespace/name
	Port     string         `json:"port"`    // name, or number if it has none
	Kind     string         `json:"kind"`
	Address  string         `json:"address"` // address:port
	Protocol string         `json:"protocol"`
	From     string         `json:"from"`
	Tried    bool           `json:"tried"`
	Fault    string         `json:"fault,omitempty"` // empty: all is as it should be
	Note     string         `json:"note,omitempty"`  // why no pod answers
	Answers  map[string]int `json:"answers,omitempty"`
	Source   string         `json:"source,omitempty"`      // whose address pods see: kept or node's
	Times    float64        `json:"timesDirect,omitempty"` // how many times as long as to the pod itself
}

// outcome is all of it for machines.
type outcome struct {
	Ways     []way          `json:"ways"`
	Faults   []string       `json:"faults"`   // those of ways, and of what came after them
	Plane    string         `json:"plane"`    // that served
	Problems []string       `json:"problems"` // of manifests
	Warnings []string       `json:"warnings"` // probable mistakes in them
	Log      []string       `json:"log"`      // of the proxy: what it warns of
	Notes    []string       `json:"notes"`
	Skipped  map[string]int `json:"skipped"` // objects by kind
}

// printJSON tells machines what the text tells people.
func (d *demo) printJSON() error {
	out := outcome{
		Ways: []way{}, Faults: append([]string{}, d.faults...), Problems: []string{}, Warnings: []string{},
		Plane: d.plane, Log: d.proxy.warnings(),
		Notes: append([]string{}, d.result.Notes...), Skipped: d.result.Skipped,
	}
	for _, p := range d.problems {
		out.Problems = append(out.Problems, p.Error())
	}
	for _, p := range d.warnings {
		out.Warnings = append(out.Warnings, p.Error())
	}
	for _, t := range d.trials {
		w := way{
			Service: t.Service, Port: t.Port, Kind: string(t.Kind), Address: t.To.String(), Protocol: t.Protocol.String(),
			From: string(t.from), Tried: t.tried, Fault: t.fault, Note: t.note, Answers: t.answers, Times: t.slower(),
		}
		if len(t.answers) > 0 {
			w.Source = t.seen()
		}
		out.Ways = append(out.Ways, w)
	}
	e := json.NewEncoder(d.Out)
	e.SetIndent("", "  ")
	return e.Encode(out)
}
