package study

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"fairlead.dev/fairlead/engine"
)

// The data planes of Fairlead that are more than a name here.
const (
	nftablesPlane  = "nftables"
	ebpfPlane      = "ebpf"
	iptablesPlane  = "iptables"        // by nf_tables
	legacyPlane    = "iptables-legacy" // by the older interface
	userspacePlane = "userspace"
	ipvsPlane      = "ipvs"
)

// Planes are all that Fairlead has, as contenders are named.
func Planes() []string {
	return []string{nftablesPlane, iptablesPlane, legacyPlane, ebpfPlane, userspacePlane, ipvsPlane}
}

// PeerModes are those of kube-proxy.
func PeerModes() []string { return []string{iptablesPlane, nftablesPlane, ipvsPlane} }

// Contenders are direct access, twice, and Fairlead's data planes.
func Contenders(planes []string) []Contender {
	all := []Contender{{Name: "direct", Kind: Direct}, {Name: "direct again", Kind: Again}}
	for _, p := range planes {
		all = append(all, Contender{Name: p, Kind: Fairlead, Plane: p})
	}
	return all
}

// Peers are a kube-proxy in all its modes: iptables by the older interface, as in the published studies, if the machine
// has that.
func Peers(name, program string) (all []Contender) {
	for _, mode := range PeerModes() {
		c := Contender{Name: name + " " + mode, Kind: Peer, Plane: mode, Program: program}
		if mode == iptablesPlane {
			if c.Legacy = legacyProgram() != ""; c.Legacy {
				c.Note = "with iptables-legacy"
			}
		}
		all = append(all, c)
	}
	return all
}

// VersionOf asks a program.
func VersionOf(ctx context.Context, program string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	text, err := exec.CommandContext(ctx, program, "--version").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s --version: %w: %s", program, err, strings.TrimSpace(string(text)))
	}
	line, _, _ := strings.Cut(strings.TrimSpace(string(text)), "\n")
	return line, nil
}

// mode is how the contender is told its data plane.
func (c Contender) mode() string {
	if c.Plane == legacyPlane {
		return iptablesPlane
	}
	return c.Plane
}

// backend is the interface of iptables that a plane of Fairlead's uses.
func (c Contender) backend() string {
	return map[string]string{iptablesPlane: "nf_tables", legacyPlane: "legacy"}[c.Plane]
}

// legacyProgram is the one that is all of the older iptables; empty: there is none.
func legacyProgram() string {
	for _, name := range []string{"xtables-legacy-multi", "/usr/sbin/xtables-legacy-multi"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	return ""
}

// programs are the versions of the contenders' programs. One that does not tell is left out; why is seen when it is
// tried.
func programs(ctx context.Context, all []Contender) map[string]string {
	versions := map[string]string{}
	for _, c := range all {
		name := strings.TrimSuffix(c.Name, " "+c.Plane)
		if c.Kind == Peer && versions[name] == "" {
			if v, err := VersionOf(ctx, c.Program); err == nil {
				versions[name] = v
			}
		}
	}
	return versions
}

// lacking says that another contender runs at the site: Fairlead takes another plane where the kernel cannot
// do what one needs. Or it says that the contender cannot change to the plane that it is to change to.
func (s *Site) lacking(ctx context.Context) error {
	if s.Kind == Fairlead {
		answer, err := engine.Ask(ctx, s.ControlSocket, "/status")
		if err != nil {
			return err
		}
		var r engine.Report
		if err := json.Unmarshal(answer, &r); err != nil {
			return fmt.Errorf("the proxy's status: %w", err)
		}
		if r.Plane != r.Mode {
			return errors.New(reason(s.Proxy.Log()))
		}
	}
	if s.To == "" {
		return nil
	}
	return s.change(ctx, s.To)
}

// reason is the error of the first warning of a log.
func reason(log string) string {
	for line := range strings.SplitSeq(log, "\n") {
		if _, said, ok := strings.Cut(line, " error="); ok && strings.Contains(line, "level=WARN") {
			if text, err := strconv.Unquote(said); err == nil {
				return text
			}
			return said
		}
	}
	return "this machine cannot do what it needs"
}

// environment is what the contender's proxy gets beside this process's. Programs of the older iptables are found before
// others: they are links in the site's directory.
func (s *Site) environment() ([]string, error) {
	if !s.Legacy {
		return nil, nil
	}
	bin, program := filepath.Join(s.dir, "bin"), legacyProgram()
	if program == "" {
		return nil, errors.New("the machine has no xtables-legacy-multi")
	}
	if err := os.Mkdir(bin, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	for _, name := range []string{"iptables", "ip6tables"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			err := os.Symlink(program, filepath.Join(bin, name+suffix))
			if err != nil && !errors.Is(err, os.ErrExist) {
				return nil, err
			}
		}
	}
	return []string{"PATH=" + bin + ":" + os.Getenv("PATH")}, nil
}
