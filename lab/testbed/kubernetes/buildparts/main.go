// Command buildparts builds the programs of a real control plane, and kube-proxy, unless they are in the
// cache, and prints their directory.
//
//	testbed/kubernetes/parts (go.mod) ─► go build ─► ~/.cache/fairlead/parts-<hash>/kube-apiserver …
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/testbed/kubernetes"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	parts, err := kubernetes.BuildParts(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, "buildparts:", err)
		os.Exit(1)
	}
	fmt.Println(parts.Dir)
}
