package xt

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
)

// TestLock: iptables and this package wait for each other wherever the environment has the lock be.
func TestLock(t *testing.T) {
	file := filepath.Join(t.TempDir(), "lock")
	t.Setenv(lockVariable, file)
	first, err := Lock(t.Context(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(file); err != nil {
		t.Error(err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if second, err := Lock(ended, slog.New(slog.DiscardHandler)); !errors.Is(err, context.Canceled) {
		t.Errorf("a second one has %v, %v", second, err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	second, err := Lock(ended, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	_ = second.Close()
}
