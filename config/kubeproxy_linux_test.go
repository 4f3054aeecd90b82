package config_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
)

// TestFlagsAreKubeProxys holds the committed list of flags against the real program.
func TestFlagsAreKubeProxys(t *testing.T) {
	help, err := exec.CommandContext(t.Context(), kubernetes.NeedParts(t).Path("kube-proxy"), "--help").Output()
	if err != nil {
		t.Fatal(err)
	}
	theirs := slices.DeleteFunc(flagsIn(string(help)), func(line string) bool { return line == "--help, -h" })
	if *update {
		write(t, goldenFlags, strings.Join(theirs, "\n")+"\n")
	}
	if want := golden(t); !slices.Equal(theirs, want) {
		t.Errorf("--- kube-proxy\n%s\n--- %s\n%s", strings.Join(theirs, "\n"), goldenFlags, strings.Join(want, "\n"))
	}
}

// TestKubeProxyDoesTheSame runs the real kube-proxy on every case. Fairlead accepts the same cases, with the same
// effective configuration, and refuses the same ones, naming the same fields.
func TestKubeProxyDoesTheSame(t *testing.T) {
	program := kubernetes.NeedParts(t).Path("kube-proxy")
	for _, c := range trials(t) {
		t.Run(c.name(), func(t *testing.T) {
			if why, ok := c.file("kube-proxy"); ok {
				t.Logf("kube-proxy differs: %s", why)
				return
			}
			arguments := c.arguments(t)
			theirs := filepath.Join(c.dir, "theirs")
			arguments = append(arguments, "--write-config-to="+theirs)
			_, loaded, err := load(arguments)
			output, theirErr := exec.CommandContext(t.Context(), program, arguments...).CombinedOutput()
			switch {
			case err == nil && theirErr == nil:
				compareWritten(t, loaded, theirs)
			case err == nil:
				t.Errorf("kube-proxy refuses what we accept: %s", output)
			case theirErr == nil:
				t.Errorf("kube-proxy accepts what we refuse: %v", err)
			default:
				sameFields(t, err.Error(), string(output))
			}
		})
	}
}

func compareWritten(t *testing.T, loaded *config.Config, theirs string) {
	t.Helper()
	ours := theirs + ".ours"
	if err := loaded.WriteKubeProxy(ours); err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile(theirs)
	if err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(ours)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != string(want) {
		t.Errorf("--- we\n%s--- kube-proxy\n%s", got, want)
	}
}

// sameFields demands that our message names every field that theirs does. Theirs are those of
// kube-proxy's internal type, of which the last part is nearly the one in the file.
func sameFields(t *testing.T, ours, theirs string) {
	t.Helper()
	names := map[string]string{
		"InterfaceName": "bridgeInterface", "InterfacePrefix": "interfaceNamePrefix", "ClusterCIDRs": "clusterCIDR",
		"ProxyMode": "mode",
	}
	field := regexp.MustCompile(`KubeProxyConfiguration\.[\w.]*?(\w+)(\[\d+\])?: (Invalid|Unsupported|Duplicate|Forbidden|Required)`)
	plain := func(s string) string { return strings.ToLower(strings.ReplaceAll(s, "-", "")) }
	for _, match := range field.FindAllStringSubmatch(theirs, -1) {
		name := match[1]
		if renamed, ok := names[name]; ok {
			name = renamed
		}
		if !strings.Contains(plain(ours), plain(name)) {
			t.Errorf("kube-proxy complains about %s, we about\n%s", match[0], ours)
		}
	}
}
