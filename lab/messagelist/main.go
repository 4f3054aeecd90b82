// Messagelist writes docs/messages.txt: every text of the agent that a person can read, in one file for reviews.
// It also writes the table of the log's keys into docs/operations.md.
//
//	packages ─► sinks: slog, errors, fmt, Events, Problems, help ─► texts, keys of the log
//	                     │ a variable, field, parameter or function as text
//	                     └─► its assignments, arguments, returns ─► texts
//
// The texts are found by following what reaches a sink backwards, through the functions of this module.
package main

import (
	"errors"
	"fmt"
	"os"
)

func main() {
	if err := errors.Join(write(os.Args[1]), writeKeys(os.Args[2])); err != nil {
		fmt.Fprintln(os.Stderr, "messagelist:", err)
		os.Exit(1)
	}
}

func write(file string) error {
	m, err := collect()
	if err != nil {
		return err
	}
	return os.WriteFile(file, []byte(m.String()), 0o644)
}
