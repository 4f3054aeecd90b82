// Command image makes Fairlead's container images, as OCI layouts, without a daemon, a registry or a
// base image. The same inputs give the same bytes.
//
//	fairlead, for each architecture ─────────► layer ─┬─► image of the agent
//	                                                  │
//	fairlead-lab ────────────────────────────► layer ─┼─► image of the laboratory
//	packages.lock ─► fetch (mirror, sha256) ─► layer ─┘ or tools: an archive
//	      ▲
//	      └── lock: apt's resolver
//
// The agent speaks to the kernel itself and starts no tool, so its image has none, no library and no shell. The
// laboratory runs other proxies for comparison. kube-proxy calls iptables, nft, ipset and conntrack: these are the
// Debian files.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("usage: image lock|agent|lab|tools [flag...]")
	}
	flags := flag.NewFlagSet(args[0], flag.ExitOnError)
	switch args[0] {
	case "lock":
		lock := lockFlag(flags)
		_ = flags.Parse(args[1:])
		return refresh(ctx, *lock)
	case "agent":
		b, err := parseBuilder(flags, args[1:])
		if err != nil {
			return err
		}
		return b.build(agentImage())
	case "lab":
		return buildLab(ctx, flags, args[1:])
	case "tools":
		debian := debianFlags(flags)
		_ = flags.Parse(args[1:])
		t, err := debian(ctx, flags.Arg(0))
		if err != nil {
			return err
		}
		return t.write(os.Stdout)
	}
	return fmt.Errorf("%q is none of lock, agent, lab, tools", args[0])
}

func buildLab(ctx context.Context, flags *flag.FlagSet, args []string) error {
	debian := debianFlags(flags)
	b, err := parseBuilder(flags, args)
	if err != nil {
		return err
	}
	return b.build(labImage(func(arch string) (tree, error) { return debian(ctx, arch) }))
}

// debianFlags returns what fetches the packages of an architecture, once the flags are parsed.
func debianFlags(flags *flag.FlagSet) func(ctx context.Context, arch string) (tree, error) {
	name := lockFlag(flags)
	cache := flags.String("cache", filepath.Join(os.TempDir(), "fairlead-debs"), "where packages are kept")
	return func(ctx context.Context, arch string) (tree, error) {
		lock, err := readLock(*name)
		if err != nil {
			return nil, err
		}
		fetcher, err := newFetcher(ctx, *cache, lock.Snapshot)
		if err != nil {
			return nil, err
		}
		return debianTree(ctx, fetcher, lock.Files[arch])
	}
}

func lockFlag(flags *flag.FlagSet) *string {
	return flags.String("lock", "packages.lock", "the file that pins the Debian packages")
}

// parseBuilder reads what both images need.
func parseBuilder(flags *flag.FlagSet, args []string) (b builder, err error) {
	flags.StringVar(&b.version, "version", "", "of the programs; the image is tagged with it")
	flags.StringVar(&b.revision, "revision", "", "the commit that they were built from")
	flags.Int64Var(&b.created, "created", 0, "when that was, in seconds since 1970")
	flags.StringVar(&b.licence, "licence", "", "the file with the programs' licence")
	flags.StringVar(&b.out, "out", "", "the directory of the layout; the archive is beside it")
	_ = flags.Parse(args)
	for _, arg := range flags.Args() {
		p, err := parsePrograms(arg)
		if err != nil {
			return b, err
		}
		b.programs = append(b.programs, p)
	}
	if b.out == "" || b.version == "" || len(b.programs) == 0 {
		return b, fmt.Errorf("usage: image %s -out DIR -version VERSION [flag...] ARCHITECTURE=DIR [...]", flags.Name())
	}
	return b, nil
}
