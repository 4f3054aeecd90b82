package study

import _ "embed" // for the schema

//go:generate go run ./schemagen . result.schema.json

//go:embed result.schema.json
var schema string

// Schema is the JSON schema of a Result.
func Schema() string { return schema }
