package kernelspace_test

import (
	"log/slog"
	"testing"
)

func testLog(t testing.TB) *slog.Logger { return slog.New(slog.NewTextHandler(t.Output(), nil)) }
