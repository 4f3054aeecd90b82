package config

// Class says what it takes to bring a changed setting into force.
type Class int

// The classes, from the least to the most.
const (
	// NoEffect: nothing, as the setting has no meaning here.
	NoEffect Class = iota
	// InPlace: something beside the engine is set anew: listeners, the log level, kernel settings.
	InPlace
	// OnTable: the engine computes its rows anew; connections live on.
	OnTable
	// Rebuild: the engine, its sources or its plane are made anew, in this process.
	Rebuild
)

// Change is a setting that differs between two Configs.
type Change struct {
	Field    string // its path in the file
	Old, New string // as JSON; empty: not set
	Class    Class
}

// Changes are sorted by their fields.
type Changes []Change

// Has reports whether there is a Change of a class.
func (c Changes) Has(class Class) bool { return false }

// String has one line for each Change.
func (c Changes) String() string { return "" }

// Compare lists what differs in the effective settings.
func Compare(before, after *Config) Changes { return nil }
