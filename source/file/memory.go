package file

import "fmt"

// The memory for parsing depends on the bytes of a text, and more on the number of values in it. A tenant decides on
// both, so that the need is estimated before anything is parsed. Of live memory, reading a file takes at most
//
//	maxMemory, or perByte and perValue for each byte and value that are parsed at one moment
//	+ 8 MiB, mostly for the parser's stack
//	+ where the parts are: 24 bytes for an item, 72 for a document; see maxItems, maxDocuments
//	+ what the objects mean
const (
	// maxMemory is what parsing may take at any moment, in bytes.
	maxMemory = 32 << 20
	perByte   = 8   // the text, its values and its JSON, in buffers that have grown
	perValue  = 160 // a node of the parser's tree, and what it becomes
)

// memory is what parsing a text takes at most, in bytes.
func memory(text []byte) int64 { return perByte*int64(len(text)) + perValue*values(text) }

// values is how many values a text has at most: those in strings and comments count as well. JSON is YAML.
func values(text []byte) (n int64) {
	for i, c := range text {
		switch c {
		case '\n', ':', '[', '{':
			n++
		case ',':
			n += 2 // in {a, b} null follows
		case '?':
			n += 3 // a map, a key, null
		case '-':
			if i+1 == len(text) || text[i+1] == ' ' || text[i+1] == '\t' || text[i+1] == '\n' || text[i+1] == '\r' {
				n++
			}
		}
	}
	return n
}

// checkMemory refuses what takes too much.
func checkMemory(text []byte) error {
	if need := memory(text); need > maxMemory {
		return fmt.Errorf("has about %d values in %d bytes, which take %d MiB of memory to parse, and %d at most; "+
			"make it several objects", values(text), len(text), need>>20, maxMemory>>20)
	}
	return nil
}
