package main

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"fairlead.dev/fairlead/dataplane/kernelspace/hns"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/hnssim"
	"fairlead.dev/fairlead/lab/wine/fakehns"
)

// asProgram makes the test binary the program.
const asProgram = "FAIRLEAD_TEST_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
	}
	os.Exit(m.Run())
}

const manifests = `
{kind: Node, apiVersion: v1, metadata: {name: node-a},
 status: {addresses: [{type: InternalIP, address: 192.0.2.1}]}}
---
{kind: Service, apiVersion: v1, metadata: {name: web, namespace: shop},
 spec: {clusterIP: 10.96.0.10, selector: {app: web}, ports: [{name: http, port: 80, targetPort: 8080}]}}
---
{kind: EndpointSlice, apiVersion: discovery.k8s.io/v1, addressType: IPv4,
 metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}, ports: [{name: http, port: 8080}],
 endpoints: [{addresses: [10.244.2.13], nodeName: node-b, conditions: {ready: true}}]}
`

// machine is one with an HNS of its own, on which the program is installed.
type machine struct {
	*testing.T
	hns         *hnssim.Service
	environment []string
	manifests   string
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	m := &machine{T: t, hns: hnssim.New(hns.Version{Major: 15, Minor: 5})}
	network, err := json.Marshal(hns.Network{Name: "cni", Type: "L2Bridge"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.hns.Do(hnssim.Call{Verb: hnssim.Create, Kind: hnssim.Networks, Document: network}); err != nil {
		t.Fatal(err)
	}
	server, err := fakehns.Start(m.hns)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Close() })
	dir := t.TempDir()
	m.manifests = filepath.Join(dir, "all.yaml")
	if err := os.WriteFile(m.manifests, []byte(manifests), 0o600); err != nil {
		t.Fatal(err)
	}
	m.environment = append(os.Environ(), asProgram+"=1", fakehns.Variable+"="+server.Address(), "ProgramData="+dir,
		"KUBE_NETWORK=cni")
	return m
}

func (m *machine) command(arguments ...string) *exec.Cmd {
	c := exec.CommandContext(m.Context(), os.Args[0], arguments...)
	c.Env = m.environment
	return c
}

// expect runs a command, and looks at its exit status and for words in what it prints.
func (m *machine) expect(status int, words []string, arguments ...string) {
	m.Helper()
	c := m.command(arguments...)
	out, err := c.CombinedOutput()
	if c.ProcessState == nil || c.ProcessState.ExitCode() != status {
		m.Errorf("%v: %v, want exit status %d\n%s", arguments, err, status, out)
	}
	for _, word := range words {
		if !strings.Contains(string(out), word) {
			m.Errorf("%v: no %q in\n%s", arguments, word, out)
		}
	}
}

// balancers are how many load balancers HNS has.
func (m *machine) balancers() int {
	m.Helper()
	answer, err := m.hns.Do(hnssim.Call{Verb: hnssim.Enumerate, Kind: hnssim.LoadBalancers})
	var ids []string
	if err == nil {
		err = json.Unmarshal(answer, &ids)
	}
	if err != nil {
		m.Fatal(err)
	}
	return len(ids)
}

func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// TestProgram_commands runs each command beside the running program, and after its end.
func TestProgram_commands(t *testing.T) {
	m := newMachine(t)
	health := freeAddress(t)
	log := filepath.Join(t.TempDir(), "log")
	run := m.command("run", "--manifests", m.manifests, "--hostname-override", "node-a", "--healthz-bind-address", health,
		"--metrics-bind-address", freeAddress(t), "--log-file", log, "-v", "2")
	run.Stdout, run.Stderr = os.Stdout, os.Stderr
	if err := run.Start(); err != nil {
		t.Fatal(err)
	}
	killed := false
	kill := func() {
		if !killed {
			killed = true
			_ = run.Process.Kill()
			_ = run.Wait()
		}
	}
	defer kill()
	eventually.Nil(t, "the rules are in force", func() error {
		response, err := http.Get("http://" + health + "/readyz")
		if err != nil {
			return err
		}
		response.Body.Close()
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("/readyz: %s", response.Status)
		}
		return nil
	})
	if n := m.balancers(); n != 1 {
		t.Errorf("%d load balancers, want 1", n)
	}
	pid := "process " + strconv.Itoa(run.Process.Pid)
	m.expect(0, []string{"data plane", "kernelspace"}, "status")
	m.expect(0, []string{"10.244.2.13:8080"}, "explain", "node", "10.96.0.10:80")
	m.expect(0, []string{"frontend 10.96.0.10:80/tcp"}, "dump")
	m.expect(0, []string{"no difference"}, "audit")
	m.expect(1, []string{"another Fairlead runs on this machine: " + pid}, "run", "--manifests", m.manifests, "--once")
	m.expect(1, []string{"stop it first (" + pid + ")"}, "clean")
	if text, err := os.ReadFile(log); err != nil || !strings.Contains(string(text), "plane=kernelspace") {
		t.Errorf("the log is %q, %v", text, err)
	}
	kill()
	m.expect(1, []string{"no proxy listens on"}, "status")
	m.expect(0, []string{"control socket: removed", "kernelspace: removed what there was"}, "clean")
	if n := m.balancers(); n != 0 {
		t.Errorf("%d load balancers are left", n)
	}
	m.expect(0, []string{"nothing was left of Fairlead"}, "clean")
}

// TestProgram_usage has what Windows does not have.
func TestProgram_usage(t *testing.T) {
	m := newMachine(t)
	run := []string{"run", "--manifests", m.manifests, "--once"}
	m.expect(0, []string{"windows/amd64"}, "version")
	m.expect(0, []string{"mode: kernelspace", `controlSocket: `}, "config")
	m.expect(1, []string{"no proxy listens"}, "switch", "nftables")
	m.expect(1, []string{"recommend needs Linux"}, "recommend", "--duration", "1s")
	m.expect(2, []string{"needs Linux; the mode of Windows is kernelspace"}, append(run, "--proxy-mode", "nftables")...)
	m.expect(1, []string{"--init-only needs Linux"}, append(run, "--init-only")...)
	m.expect(1, []string{"service manager"}, append(run, "--windows-service", "--log-file", filepath.Join(t.TempDir(), "log"))...)
	m.expect(1, []string{"another"}, append(run, "--network-name", "another")...)
}
