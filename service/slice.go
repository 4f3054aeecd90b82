package service

// ServiceOf is the name of the Service to which a slice belongs that the Table has; empty: it has none of that name.
func (t *Table) ServiceOf(slice Name) string {
	if s := t.slices[slice]; s != nil {
		return s.Service
	}
	return ""
}
