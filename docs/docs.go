// Package docs has the documents that "fairlead help" prints, and the tests of all documents.
package docs

import _ "embed"

// The pages that an operator reads in a terminal, in Markdown.
var (
	//go:embed troubleshooting.md
	Symptoms string
	//go:embed choosing.md
	Modes string
	//go:embed glossary.md
	Glossary string
)
