//go:build !defects

package defect

// Is reports whether the program suffers from a defect.
func Is(Name) bool { return false }
