package ask_test

import (
	"encoding/json"
	"strings"
	"testing"

	"fairlead.dev/fairlead/daemon"
	"fairlead.dev/fairlead/plugin/ask"
)

// TestPrintLines_long: what keeps ten thousand rows from being programmed is in one line.
func TestPrintLines_long(t *testing.T) {
	failed := daemon.SwitchStep{Step: daemon.StepFailed, Message: strings.Repeat("this row is refused\n", 10_000)}
	line, err := json.Marshal(failed)
	if err != nil {
		t.Fatal(err)
	}
	err = ask.PrintLines(&ask.Inspection{}, strings.NewReader(string(line)+"\n"), ask.StepText)
	if err.Error() != failed.Message {
		t.Errorf("%d bytes became: %.500s", len(failed.Message), err)
	}
}
