package said

import (
	"fmt"
	"strings"
)

// Meant asks whether a word was meant to be one of others: the one that differs from it by the fewest letters, at most
// by a third of them. The question ends a sentence about the word, and is empty if no other is so near.
func Meant(word string, others []string) string {
	for n := range max(1, min(len(word)/3, maxEdits)) + 1 {
		for _, other := range others {
			if other != word && within(n, strings.ToLower(word), strings.ToLower(other)) {
				return fmt.Sprintf("; did you mean %q?", other)
			}
		}
	}
	return ""
}

// maxEdits bounds the work for a word, which a tenant has written.
const maxEdits = 4

// within reports whether n letters have to be added, taken away, replaced, or swapped with the next one, at most, to
// make a word another one.
func within(n int, a, b string) bool {
	for a != "" && b != "" && a[0] == b[0] {
		a, b = a[1:], b[1:]
	}
	switch {
	case max(len(a)-len(b), len(b)-len(a)) > n:
		return false
	case a == "" || b == "":
		return true
	case n == 0:
		return false
	}
	swapped := len(a) > 1 && len(b) > 1 && a[0] == b[1] && a[1] == b[0]
	return within(n-1, a[1:], b[1:]) || within(n-1, a[1:], b) || within(n-1, a, b[1:]) ||
		swapped && within(n-1, a[2:], b[2:])
}
