// Command image makes Fairlead's container image, as an OCI layout, without a daemon, a registry or a
// base image. The same inputs give the same bytes.
//
//	packages.lock ─► fetch (mirror, sha256) ─► layer of Debian files ─┐
//	fairlead, for each architecture ─────────► layer of the program ──┼─► OCI layout and archive
//	                                                                  └─► the same without Debian: -static
//	lock: apt's resolver ─► packages.lock
//
// The Debian files are the tools that move rules which other programs left: iptables in both kinds,
// nft, ipset, conntrack, and the libraries they need. Nothing in the image can be written to, and
// there is no shell.
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
		return fmt.Errorf("usage: image lock|build [flag...]")
	}
	flags := flag.NewFlagSet(args[0], flag.ExitOnError)
	lock := flags.String("lock", "packages.lock", "the file that pins the Debian packages")
	switch args[0] {
	case "lock":
		_ = flags.Parse(args[1:])
		return refresh(ctx, *lock)
	case "build":
		return build(ctx, flags, args[1:], lock)
	}
	return fmt.Errorf("%q is neither lock nor build", args[0])
}

// build reads its flags and writes the image.
func build(ctx context.Context, flags *flag.FlagSet, args []string, lock *string) error {
	var b builder
	flags.StringVar(&b.version, "version", "", "of the program; the image is tagged with it")
	flags.StringVar(&b.revision, "revision", "", "the commit that it was built from")
	flags.Int64Var(&b.created, "created", 0, "when that was, in seconds since 1970")
	flags.StringVar(&b.licence, "licence", "", "the file with the program's licence")
	flags.StringVar(&b.out, "out", "", "the directory of the layout; the archive is beside it")
	flags.StringVar(&b.cache, "cache", filepath.Join(os.TempDir(), "fairlead-debs"), "where packages are kept")
	_ = flags.Parse(args)
	for _, arg := range flags.Args() { // ARCHITECTURE=PROGRAM
		p, err := parseProgram(arg)
		if err != nil {
			return err
		}
		b.programs = append(b.programs, p)
	}
	if b.out == "" || b.version == "" || len(b.programs) == 0 {
		return fmt.Errorf("usage: image build -out DIR -version VERSION [flag...] ARCHITECTURE=PROGRAM [...]")
	}
	var err error
	if b.lock, err = readLock(*lock); err != nil {
		return err
	}
	return b.build(ctx)
}
