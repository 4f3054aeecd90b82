package migrate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

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
		text, err := os.ReadFile(dir + "/cmdline")
		args := strings.Split(strings.TrimRight(string(text), "\x00"), "\x00")
		if err != nil || filepath.Base(args[0]) != "kube-proxy" {
			continue
		}
		there, err := os.Readlink(dir + "/ns/net")
		number, bad := strconv.Atoi(filepath.Base(dir))
		// A child that kube-proxy has just forked has its name, too.
		if err == nil && bad == nil && there == here && (pid == 0 || number < pid) {
			pid, found = number, args[1:]
		}
	}
	return pid, found, err
}

// lookAtNode reads what proxies have in the kernel.
func (s *seen) lookAtNode(ctx context.Context, i *ask.Inspection) (err error) {
	var name unix.Utsname
	if err = unix.Uname(&name); err != nil {
		return fmt.Errorf("kernel: %w", err)
	}
	s.Kernel = unix.ByteSliceToString(name.Release[:])
	var status answer.Status
	if running := i.Get(ctx, "/status", &status.Report); running == nil {
		s.Proxy, s.Mode, s.By = "Fairlead", status.Plane, append(s.By, "its control socket")
		s.configured = cmp.Or(status.Mode, "iptables")
		return nil // chains named like kube-proxy's may be its own
	}
	if _, s.leftovers, err = leftovers(ctx); err != nil {
		return err
	}
	if mode := s.modeFound(); mode != "" && (s.config == nil || mode != string(s.config.KubeProxy.Mode)) {
		s.Proxy, s.Mode, s.By = "kube-proxy", mode, append(s.By, "its rules in the kernel")
	}
	for _, p := range [][3]string{{"cilium_host", "Cilium", "cilium"}, {"kube-dummy-if", "kube-router", "ipvs"}} {
		if _, err := net.InterfaceByName(p[0]); err == nil && s.Proxy == "" && s.config == nil {
			s.Proxy, s.Mode, s.By = p[1], p[2], append(s.By, "link "+p[0])
		}
	}
	return s.readSchedulers()
}

// leftovers are kube-proxy's objects in the kernel, as one text, too.
func leftovers(ctx context.Context) (text string, all []leftover, err error) {
	t, err := takeover.New(takeover.Config{KeepForward: true})
	if err != nil {
		return "", nil, err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	found, err := t.Find(ctx)
	for _, l := range found {
		text += l.String()
		all = append(all, leftover{l.Backend, l.String(), l.Stays != ""})
	}
	return text, all, err
}

// modeFound is the mode of kube-proxy whose objects the kernel has.
func (s *seen) modeFound() string {
	mode := ""
	for _, l := range s.leftovers {
		switch {
		case l.backend == "link" || l.backend == "ipvs":
			return "ipvs"
		case l.backend == "nftables":
			mode = "nftables"
		case strings.HasPrefix(l.backend, "iptables") && strings.Contains(l.text, " nat)") && mode == "":
			mode = "iptables"
		}
	}
	return mode
}

// readSchedulers counts virtual servers by scheduler. Where IPVS is not loaded, there are none.
func (s *seen) readSchedulers() error {
	s.schedulers = map[string]int{}
	text, err := os.ReadFile("/proc/thread-self/net/ip_vs")
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) > 2 && slices.Contains([]string{"TCP", "UDP", "SCTP", "FWM"}, f[0]) {
			s.schedulers[f[2]]++
		}
	}
	return err
}
