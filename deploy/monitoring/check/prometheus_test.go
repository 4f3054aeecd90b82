package check

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/lack"
)

// TestPrometheus has a real Prometheus scrape a node, load the alerts and answer the dashboard's queries.
func TestPrometheus(t *testing.T) {
	program, err := exec.LookPath("prometheus")
	if err != nil {
		lack.Skip(t, lack.Prometheus, err)
	}
	node := httptest.NewServer(exporter(t))
	defer node.Close()
	base := startPrometheus(t, program, node.Listener.Addr().String())

	var rules struct {
		Groups []struct {
			Rules []struct{ Name, Health, State, LastError string }
		}
	}
	eventually.True(t, "the alerts are evaluated", func() bool {
		ask(t, base+"/api/v1/rules", &rules)
		scraped := query(t, base, "count_over_time(fairlead_healthy[1m]) > 3") // rates need several
		return len(rules.Groups) == 1 && rules.Groups[0].Rules[0].Health == "ok" && len(scraped) == 1
	})
	for _, r := range rules.Groups[0].Rules {
		if r.Health != "ok" || r.State == "firing" {
			t.Errorf("%+v", r)
		}
	}
	for _, p := range loadDashboard(t).Panels {
		for _, q := range p.Targets {
			text := strings.NewReplacer("$__rate_interval", "5m", "$instance", ".*").Replace(q.Expr)
			if strings.Contains(text, "== 0") || strings.Contains(text, "> 0") {
				continue
			}
			// On a busy machine a scrape may have come too late: the series are stale until the next one.
			eventually.True(t, p.Title+": something comes of "+text, func() bool { return len(query(t, base, text)) > 0 })
		}
	}
}

func startPrometheus(t *testing.T, program, target string) (base string) {
	t.Helper()
	dir, address := t.TempDir(), freeAddress(t)
	alerts, err := filepath.Abs(alertsFile)
	if err != nil {
		t.Fatal(err)
	}
	config := fmt.Sprintf(`{global: {scrape_interval: 200ms, scrape_timeout: 200ms, evaluation_interval: 200ms},
rule_files: [%q], scrape_configs: [{job_name: kube-proxy, static_configs: [{targets: [%q]}]}]}`, alerts, target)
	file := filepath.Join(dir, "prometheus.yml")
	if err := os.WriteFile(file, []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	log := &strings.Builder{}
	cmd := exec.Command(program, "--config.file", file, "--storage.tsdb.path", filepath.Join(dir, "data"),
		"--web.listen-address", address)
	cmd.Stderr = log
	runtime.LockOSThread() // whose end the next line speaks of
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Log(log)
		}
	})
	eventually.True(t, "Prometheus is ready", func() bool {
		response, err := http.Get("http://" + address + "/-/ready")
		if err != nil {
			return false
		}
		defer response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
	return "http://" + address
}

// freeAddress is one without a listener.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func query(t *testing.T, base, expr string) []any {
	t.Helper()
	var data struct{ Result []any }
	ask(t, base+"/api/v1/query?query="+url.QueryEscape(expr), &data)
	return data.Result
}

func ask(t *testing.T, address string, data any) {
	t.Helper()
	response, err := http.Get(address)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	answer := struct {
		Status, Error string
		Data          any
	}{Data: data}
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil || answer.Status != "success" {
		t.Fatal(address, answer.Error, err)
	}
}
