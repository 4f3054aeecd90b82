package service

// ServiceOf is the name of the Service to which a slice belongs that the Table has; empty: it has none of that name.
func (t *Table) ServiceOf(slice Name) string {
	if s := t.slices[slice]; s != nil {
		return s.Service
	}
	return ""
}

// Size is how many addresses with a port a Service that the Table has claims, and how many backends its slices have,
// each for each port.
func (t *Table) Size(name Name) (frontends, backends int) {
	e := t.entries[name]
	if e == nil {
		return 0, 0
	}
	for _, s := range e.slices {
		backends += len(s.Ports) * len(s.Endpoints)
	}
	return len(e.claims), backends
}
