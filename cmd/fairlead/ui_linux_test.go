package main

import (
	"errors"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"

	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/lab/eventually"
)

// TestUI has the page follow a running proxy, through its absence and back.
func TestUI(t *testing.T) {
	w := newWorld(t)
	at := netip.MustParseAddrPort("127.0.0.1:10247")
	page := w.follow(w.command("ui", "--control-socket", w.socket))
	says := func(text string) {
		t.Helper()
		eventually.True(t, "the page says "+text, func() bool {
			status, body := w.page(at, "/state?open=default/web+80/tcp")
			return status == http.StatusOK && strings.Contains(body, text)
		})
	}
	says(`"error":"no proxy listens on ` + w.socket)
	p := w.start("--proxy-mode", "userspace")
	w.reaches("pod-a")
	for _, text := range []string{
		`"service":"default/web"`, `"address":"10.96.0.10:80"`, `"ready":2`, `["data plane","userspace`, `"alarms":null`,
		w.bed.Addr("pod-a", false).String() + `:8080","state":"ready"`, `"rate":0`,
	} {
		says(text)
	}
	w.write("bad.yaml", strings.ReplaceAll(web[:strings.Index(web, "---\napiVersion: discovery")], "name: web", "name: other"))
	says(`"Service default/web: ClusterIP 10.96.0.10:80/tcp: belongs to `)
	_ = p.Process.Kill()
	_ = p.Wait()
	says(`"error":"no proxy listens on ` + w.socket)
	w.says(cli.ExitFound, []string{"--address: listen tcp 127.0.0.1:10247: bind: address already in use"}, "ui")
	w.says(cli.ExitUsage, []string{"--address: address nonsense: missing port"}, "ui", "--address", "nonsense")

	_ = page.Process.Signal(os.Interrupt)
	var exit *exec.ExitError
	if err := page.Wait(); !errors.As(err, &exit) || exit.ExitCode() != cli.ExitInterrupted {
		t.Errorf("interrupted, it ends with %v", err)
	}
}
