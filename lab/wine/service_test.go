package wine

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/wine/fakehns"
)

// The service manager starts and stops the agent. Rules stay.
func TestService(t *testing.T) {
	n := newNode(t)
	n.manifests("10.244.1.11")
	for variable, value := range map[string]string{fakehns.Variable: n.server.Address(), "KUBE_NETWORK": "cni"} {
		n.does("reg", "add", `HKLM\System\CurrentControlSet\Control\Session Manager\Environment`, "/v", variable, "/d", value)
	}
	n.end() // the service manager reads its environment when it starts
	n.busy()
	log := filepath.Join(n.dir, "drive_c", "agent.log")
	line := append([]string{path(n.program), "run", "--windows-service", "--log-file", `C:\agent.log`}, n.flags...)
	n.does("sc", "create", "fairlead", "start=", "demand", "binPath=", strings.Join(line, " "))
	t.Cleanup(func() {
		if text, err := os.ReadFile(log); t.Failed() {
			t.Logf("the service's log: %v\n%s", err, text)
		}
	})
	n.does("sc", "start", "fairlead")
	n.serves("the Service", "10.244.1.11")
	n.state("RUNNING")
	n.manifests("10.244.1.12")
	n.serves("a change", "10.244.1.12")
	n.does("sc", "stop", "fairlead")
	n.state("STOPPED")
	n.serves("after the stop", "10.244.1.12")
	n.does("sc", "start", "fairlead")
	n.state("RUNNING")
}

// busy has a program run all the time. Wine ends its services when there is none.
func (n *node) busy() {
	n.t.Helper()
	c, _ := n.command(n.t, "cmd")
	held, err := c.StdinPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() {
		held.Close()
		_ = c.Process.Kill() // it may have ended
		_ = c.Wait()
	})
}

// does runs a program of Windows.
func (n *node) does(program string, args ...string) string {
	n.t.Helper()
	text, err := n.run(n.t, program, args...)
	if err != nil {
		n.t.Fatal(err)
	}
	return text
}

// state waits until the service manager says that the service is in a state.
func (n *node) state(want string) {
	n.t.Helper()
	eventually.True(n.t, "the service is "+want, func() bool {
		return strings.Contains(n.does("sc", "query", "fairlead"), want)
	})
}
