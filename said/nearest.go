package said

import (
	"fmt"
	"strings"
)

// Meant asks whether a word was meant to be one of others: the one that differs from it by a few letters. The question
// ends a sentence about the word, and is empty if no other is so near.
func Meant(word string, others []string) string {
	best, least := "", max(1, len(word)/3)+1
	for _, other := range others {
		if d := edits(strings.ToLower(word), strings.ToLower(other), least); d < least && other != word {
			best, least = other, d
		}
	}
	if best == "" {
		return ""
	}
	return fmt.Sprintf("; did you mean %q?", best)
}

// longestWord bounds the work for one word, which a tenant has written.
const longestWord = 128

// edits is how many letters have to be added, taken away, replaced, or swapped with the next one to make a word
// another one. From least on it may be any number that is not less.
func edits(a, b string, least int) int {
	if max(len(a)-len(b), len(b)-len(a)) >= least || len(a) > longestWord {
		return least
	}
	previous, last, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range last {
		last[j] = j
	}
	for i := range len(a) {
		row[0] = i + 1
		for j := range len(b) {
			replaced := last[j]
			if a[i] != b[j] {
				replaced++
			}
			row[j+1] = min(replaced, last[j+1]+1, row[j]+1)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				row[j+1] = min(row[j+1], previous[j-1]+1)
			}
		}
		previous, last, row = last, row, previous
	}
	return last[len(b)]
}
