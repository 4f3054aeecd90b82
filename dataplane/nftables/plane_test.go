package nftables

import (
	"context"
	"os/exec"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// inNamespace runs f on a thread in a new network namespace, which goes with the thread.
func inNamespace(t *testing.T, f func()) {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		defer close(done)
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- err
			return
		}
		f()
	}()
	if err := <-done; err != nil {
		t.Skipf("needs root or a user namespace: %v", err)
	}
}

const example = `
backend default/web:http cluster 10.244.1.2:8080 local
backend default/web:http cluster 10.244.2.2:8080
backend default/web:http cluster 10.244.2.3:8080 weight 2
backend default/web:http cluster6 [fd00::1]:8080
backend default/web:http local 10.244.1.2:8080 local
frontend 10.96.0.10:80/tcp any forward default/web:http cluster snat offcluster
frontend 10.96.0.10:81/tcp any reject default/web:admin
frontend 10.96.0.10:82/udp any drop default/web:none
frontend 192.0.2.1:30080/tcp any forward default/web:http local snat never allow 10.0.0.0/8,192.0.2.0/24
frontend 192.0.2.1:30080/tcp internal forward default/web:http cluster snat always
frontend [fd00::10]:80/tcp any forward default/web:http cluster6 snat offcluster allow fd00::/64
guard 10.96.0.0/16 drop
guard 10.96.0.10/32 reject
guard 10.96.7.0/24 reject
guard fd00::10/128 reject
pods 10.244.0.0/16
pods interface cali*
pods interface cbr0
pool default/web:http cluster affinity 3h0m0s
pool default/web:http cluster6
pool default/web:http local
`

func TestList(t *testing.T) {
	s, err := model.ParseState(example)
	if err != nil {
		t.Fatal(err)
	}
	inNamespace(t, func() {
		p, err := New(dataplane.Config{})
		if err != nil {
			t.Error(err)
			return
		}
		defer p.Close()
		ctx := context.Background()
		if err := p.Sync(ctx, s); err != nil {
			t.Error(err)
		}
		out, err := exec.Command("nft", "list", "ruleset").CombinedOutput()
		t.Logf("%s%v", out, err)
		drifts, err := p.Audit(ctx, s)
		t.Logf("%v %v", drifts, err)
	})
}
