//go:build defects

package defect

import "os"

// Is reports whether the program suffers from a defect.
func Is(n Name) bool { return os.Getenv("FAIRLEAD_DEFECT") == string(n) }
