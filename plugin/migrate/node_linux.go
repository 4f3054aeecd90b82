package migrate

import (
	"cmp"
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"fairlead.dev/fairlead/plugin/answer"
	"fairlead.dev/fairlead/plugin/ask"
	"fairlead.dev/fairlead/takeover"
)

// findProcess finds kube-proxy in this network namespace; pid 0: it does not run.
func findProcess() (pid int, found []string, err error) {
	here, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		return 0, nil, err
	}
	all, err := filepath.Glob("/proc/[0-9]*")
	for _, dir := range all {
		text, _ := os.ReadFile(dir + "/cmdline") // the process may have ended
		there, _ := os.Readlink(dir + "/ns/net")
		number, _ := strconv.Atoi(filepath.Base(dir))
		args := strings.Split(strings.TrimRight(string(text), "\x00"), "\x00")
		// A child that kube-proxy has just forked has its name, too.
		if filepath.Base(args[0]) == "kube-proxy" && there == here && (pid == 0 || number < pid) {
			pid, found = number, args[1:]
		}
	}
	return pid, found, err
}

// lookAtNode reads what proxies have in the kernel.
func (s *seen) lookAtNode(ctx context.Context, i *ask.Inspection) error {
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return err
	}
	s.Kernel = strings.TrimSpace(string(release))
	var status answer.Status
	if running := i.Get(ctx, "/status", &status.Report); running == nil {
		s.Proxy, s.Mode, s.By = "Fairlead", status.Plane, append(s.By, "its control socket")
		s.configured = cmp.Or(status.Mode, "iptables")
		return nil // chains named like kube-proxy's may be its own
	}
	if s.leftovers, err = leftovers(ctx); err != nil {
		return err
	}
	if mode := s.modeFound(); mode != "" && (s.config == nil || mode != string(s.config.KubeProxy.Mode)) {
		s.Proxy, s.Mode, s.By = "kube-proxy", mode, append(s.By, "its rules in the kernel")
	}
	if s.modeFound() == "ipvs" {
		if s.foreign, err = ofKernel(func(t *takeover.Takeover) ([]string, error) { return t.Foreign(ctx) }); err != nil {
			return err
		}
	}
	s.lookAtLinks()
	table, err := os.ReadFile("/proc/thread-self/net/ip_vs")
	if errors.Is(err, os.ErrNotExist) { // IPVS is not loaded
		return nil
	}
	for line := range strings.Lines(string(table)) {
		if f := strings.Fields(line); len(f) > 2 && slices.Contains([]string{"TCP", "UDP", "SCTP", "FWM"}, f[0]) {
			s.schedulers[f[2]]++
		}
	}
	return err
}

// lookAtLinks finds other proxies. kube-proxy's ConfigMap may be there without it, and Cilium without being the proxy.
func (s *seen) lookAtLinks() {
	ofMap := s.config == nil || slices.Contains(s.By, "ConfigMap "+kubeProxyConfig)
	if s.Proxy != "" || len(s.leftovers) > 0 || !ofMap {
		return
	}
	for _, p := range [][3]string{{"cilium_host", "Cilium", "cilium"}, {"kube-dummy-if", "kube-router", "ipvs"}} {
		serves := p[1] != "Cilium" || s.maps[ciliumConfig] == nil || s.ciliumReplaces()
		if _, err := net.InterfaceByName(p[0]); err == nil && serves {
			s.Proxy, s.Mode, s.By, s.config = p[1], p[2], []string{"link " + p[0]}, nil
			return
		}
	}
}

// leftovers are kube-proxy's objects in the kernel.
func leftovers(ctx context.Context) ([]takeover.Leftover, error) {
	return ofKernel(func(t *takeover.Takeover) ([]takeover.Leftover, error) { return t.Find(ctx) })
}

func ofKernel[T any](ask func(*takeover.Takeover) ([]T, error)) ([]T, error) {
	t, err := takeover.New(takeover.Config{KeepForward: true})
	if err != nil {
		return nil, err
	}
	found, err := ask(t)
	return found, errors.Join(err, t.Close())
}

// modeFound is the mode of kube-proxy whose objects the kernel has.
func (s *seen) modeFound() (mode string) {
	for _, l := range s.leftovers {
		switch {
		case l.Backend == "link" || l.Backend == "ipvs":
			return "ipvs"
		case l.Backend == "nftables":
			mode = "nftables"
		case l.Table == "nat" && mode == "":
			mode = "iptables"
		}
	}
	return mode
}
