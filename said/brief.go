package said

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

const (
	// maxNames is how many of the objects that are wrong a line names.
	maxNames = 5
	// MaxText is the length of what Brief returns, in bytes. The note of an Event, which may have 1024, has room for it.
	MaxText = 1000
	// tail is what of that the end takes, which says how much is missing.
	tail = 40
)

// Brief is the beginning of a text, and says how much more there is. Of an error that joins others, of which each has a
// line, those are the first few. A tenant decides how many rows an error names; it must not decide how long a line is.
func Brief(text string) string {
	kept, rest := text, 0
	if lines := strings.SplitN(text, "\n", maxNames+1); len(lines) > maxNames {
		rest = 1 + strings.Count(lines[maxNames], "\n")
		kept = strings.Join(lines[:maxNames], "\n")
	}
	if len(kept) > MaxText-tail && (rest > 0 || len(kept) > MaxText) {
		kept, rest = shorten(kept, rest)
	}
	if rest > 0 {
		kept += fmt.Sprintf("\nand %d more", rest)
	}
	return kept
}

// shorten takes away the last lines, or the end of a single one. It returns how many lines are missing then.
func shorten(text string, missing int) (string, int) {
	for len(text) > MaxText-tail {
		end := strings.LastIndexByte(text, '\n')
		if end < 0 {
			return cut(text), missing
		}
		text, missing = text[:end], missing+1
	}
	return text, missing
}

// cut ends a line early, but in no character.
func cut(line string) string {
	end := MaxText - 2*tail
	for end > 0 && !utf8.RuneStart(line[end]) {
		end--
	}
	return fmt.Sprintf("%s… (%d bytes more)", line[:end], len(line)-end)
}

// Count is a number of things, such as "1 pool" or "2 pools". The plural is the noun with an s.
func Count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// List names the first few, and says how many more there are.
func List(names []string) string {
	if len(names) <= maxNames {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:maxNames], ", "), len(names)-maxNames)
}
