package tools

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"text/template"
	"time"

	"fairlead.dev/fairlead/lab/testbed/traffic"
)

// StartNginx starts nginx, as one process, with the Server's ports and limit. It cannot delay answers.
func (a At) StartNginx(ctx context.Context, s traffic.Server) (*Daemon, error) {
	if err := need(map[string]bool{
		"other protocol than HTTP": s.Protocol != traffic.HTTP && s.Protocol != "", "delay": s.Delay > 0,
		"rate below one per minute":       s.Limit.Rate > 0 && s.Limit.Rate*60 < 1,
		"configured answer of 4096 bytes": s.Bytes >= 4096,
	}); err != nil {
		return nil, fmt.Errorf("tools: nginx: %w", err)
	}
	dir, err := os.MkdirTemp("", "fairlead-nginx-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir) // what nginx needs of it, it has read
	config := filepath.Join(dir, "nginx.conf")
	if err := os.WriteFile(config, []byte(nginxConfig(dir, s)), 0o600); err != nil {
		return nil, err
	}
	// It says so when it listens, and writes its number afterwards.
	d, err := command{a, Nginx}.start(ctx, "event method", "-p", dir, "-c", config, "-e", "stderr")
	if err != nil {
		return nil, err
	}
	if err := d.awaitFile(filepath.Join(dir, "pid")); err != nil {
		return nil, err
	}
	return d, nil
}

// awaitFile returns when there is a file that the server makes as it begins. If it ends before, it is closed.
func (d *Daemon) awaitFile(name string) error {
	for {
		if _, err := os.Stat(name); err == nil {
			return nil
		}
		select {
		case <-d.words:
			return cmp.Or(d.Close(), fmt.Errorf("tools: %s has ended at once", d.cmd.Path))
		case <-time.After(time.Millisecond): // nobody announces it
		}
	}
}

// nginxConfig has one process, which cannot be left behind by another one that is killed. The answer is that of a
// location of its own: it would otherwise be given before limits are looked at.
func nginxConfig(dir string, s traffic.Server) string {
	var text strings.Builder
	err := template.Must(template.New("").Parse(`daemon off;
master_process off;
pid {{.Dir}}/pid;
error_log stderr notice;
events { worker_connections 40000; }
http {
	access_log off;
	client_body_temp_path {{.Dir}}/body;
	proxy_temp_path {{.Dir}}/proxy;
	fastcgi_temp_path {{.Dir}}/fastcgi;
	uwsgi_temp_path {{.Dir}}/uwsgi;
	scgi_temp_path {{.Dir}}/scgi;
	keepalive_requests 1000000000;
	{{- with .Limit.Rate}}
	limit_req_zone $server_port zone=backends:8m rate={{$.PerMinute}}r/m;
	limit_req_log_level info;
	{{- end}}
	server {
		{{- range .Ports}}
		listen {{.}} backlog=4096;
		listen [::]:{{.}} ipv6only=on backlog=4096;
		{{- end}}
		default_type text/plain;
		location / {
			{{- if .Limit.Rate}}
			limit_req zone=backends burst={{.Limit.Burst}}{{if .Limit.NoDelay}} nodelay{{end}};
			{{- end}}
			try_files /nothing @answer;
		}
		location @answer { return 200 "{{.Body}}"; }
	}
}
`)).Execute(&text, struct {
		traffic.Server
		Dir, Body string
		PerMinute int
	}{s, dir, strings.Repeat("x", s.Bytes), int(math.Round(s.Limit.Rate * 60))})
	if err != nil {
		panic(err) // the template does not fit the values
	}
	return text.String()
}
