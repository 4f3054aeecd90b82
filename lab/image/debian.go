package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
)

// debianTree is the files of the packages for one architecture, with what dpkg knows of each in the
// form that scanners read in images without dpkg.
func debianTree(ctx context.Context, f *fetcher, packages []file) (tree, error) {
	t := tree{}
	for _, p := range packages {
		deb, err := f.fetch(ctx, p)
		if err != nil {
			return nil, err
		}
		if err := t.addPackage(ctx, p.Name, deb); err != nil {
			return nil, fmt.Errorf("%s %s: %w", p.Name, p.Version, err)
		}
	}
	t.addLinks()
	return t, nil
}

func (t tree) addPackage(ctx context.Context, name, deb string) error {
	data, err := dpkgDeb(ctx, "--fsys-tarfile", deb)
	if err != nil {
		return err
	}
	if err := t.addTar(data, wanted); err != nil {
		return err
	}
	control, err := dpkgDeb(ctx, "--field", deb)
	if err != nil {
		return err
	}
	t.addFile("var/lib/dpkg/status.d/"+name, 0o644, control)
	return nil
}

func dpkgDeb(ctx context.Context, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "dpkg-deb", args...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("dpkg-deb: %w", err)
	}
	return out, nil
}

// wanted says what of a package comes into the image: not what people read, but for the licences, and
// not what an init system or a shell would read.
func wanted(name string) bool {
	unwanted := regexp.MustCompile(`^/(etc/(init\.d|default|profile\.d|update-motd\.d|dpkg|skel)|` +
		`root|home|srv|media|mnt|boot|var/(backups|cache|local|mail|spool|opt)|` +
		`usr/(games|include|local|src)|usr/lib/(systemd|sysctl\.d)|` +
		`usr/lib/[^/]+-linux-gnu[^/]*/(gconv|audit)|` +
		`usr/share/(base-files|bash-completion|bug|doc-base|gcc|gdb|info|lintian|locale|man|misc|nftables|pixmaps))(/|$)|` +
		`^/usr/share/doc/.*/(NEWS|README|changelog|TODO|examples)`)
	return !unwanted.MatchString(name)
}

// addLinks makes the links that Debian's maintainer scripts would: plain iptables is that on nf_tables.
func (t tree) addLinks() {
	t.addLink("var/run", "/run")
	t.addLink("var/lock", "/run/lock")
	for _, tool := range []string{"iptables", "ip6tables"} {
		for _, verb := range []string{"", "-save", "-restore"} {
			t.addLink("usr/sbin/"+tool+verb, tool+"-nft"+verb)
		}
	}
}
