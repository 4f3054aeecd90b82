package daemon

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/lab/eventually"
)

// A file is read when its writer has paused, not in the midst of what it writes.
func TestWatcher_slowWriter(t *testing.T) {
	t.Parallel()
	file, err := os.Create(filepath.Join(t.TempDir(), "config.conf"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	w := newWatcher(time.Hour)
	defer w.close()
	w.follow([]string{file.Name()})
	write := func() (at time.Time) {
		t.Helper()
		if _, err := file.WriteString("text\n"); err != nil {
			t.Fatal(err)
		}
		return time.Now()
	}
	pace := time.NewTicker(quiet / 10) // the writer's
	defer pace.Stop()
	last, heldUp := write(), false
	for start := last; time.Since(start) < 4*quiet; {
		<-pace.C
		select {
		case <-w.changed:
			if time.Since(last) < quiet && !heldUp {
				t.Error("it does not wait until the writer has paused")
			}
			heldUp = false
		default:
		}
		now := write()
		heldUp = heldUp || now.Sub(last) > quiet/2 // as this test's process may be: then the writer has paused
		last = now
	}
	eventually.Receive(t, "the file was written", w.changed)

	// Endless writes do not keep the file from being read.
	write()
	eventually.Taking(patience).Nil(t, "it is read while it is written", func() error {
		write()
		select {
		case <-w.changed:
			return nil
		default:
			return errors.New("it is not read")
		}
	})
}

// A configuration that is being applied is given up when the files say something else, not when they are looked at.
func TestWatcher_whenOther(t *testing.T) {
	w := newWatcher(time.Hour)
	defer w.close()
	now, looked, outdated := configured(t, "mode: iptables"), make(chan struct{}), make(chan struct{})
	other := configured(t, "mode: nftables")
	says := make(chan *config.Config)
	load := func() (*config.Config, error) {
		looked <- struct{}{}
		return <-says, nil
	}
	stop := w.whenOther(t.Context(), load, now, func() { close(outdated) })
	for _, c := range []*config.Config{now, other} {
		w.renew()
		eventually.Receive(t, "a look", looked)
		select {
		case <-outdated:
			t.Fatal("it is outdated though nothing has changed")
		case says <- c:
		}
	}
	eventually.Receive(t, "the end", outdated)
	stop()
	eventually.Receive(t, "the token", w.changed)
	w.whenOther(t.Context(), load, now, func() { t.Error("nobody has touched the files") })()
	if len(w.changed) > 0 {
		t.Error("there is a token")
	}
}
