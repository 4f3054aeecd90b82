package kernelspace_test

import (
	"log/slog"
	"testing"
)

func testLog(t *testing.T) *slog.Logger { return slog.New(slog.NewTextHandler(t.Output(), nil)) }
