package integration

import (
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
	"fairlead.dev/fairlead/model"
)

// A Deployment is rolled, drained from its nodes, scaled to nothing and back, and its proxy restarted.
// Its pods serve for some seconds after they were told to go, so that no connection needs to fail.
func TestDeployment(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"nftables", "iptables"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			testDeployment(newWorldIn(t, mode, kubernetes.Options{}))
		})
	}
}

func testDeployment(w *world) {
	const linger = 5 * time.Second
	w.deployWeb(linger)
	w.step("rolling update", func(w *world) {
		lasted := w.converse()
		start := time.Now()
		w.unbroken(func() {
			w.kubectl("set", "env", "deployment/web", "VERSION=2")
			w.rolledOut()
		})
		if d := (<-lasted).Sub(start); d < linger {
			w.Errorf("a connection that was open ended after %s, before its pod did", d)
		}
	})
	for _, node := range []string{"node-b", "node"} {
		w.step("drain "+node, func(w *world) {
			w.unbroken(func() {
				w.kubectl("drain", node, "--timeout=120s")
				w.rolledOut()
			})
			w.kubectl("uncordon", node)
		})
	}
	w.step("the proxy is killed", func(w *world) {
		w.unbroken(func() {
			if err := w.proxy.Kill(); err != nil {
				w.Fatal(err)
			}
			w.startProxy()
		})
	})
	w.step("scale to zero and back", func(w *world) { w.scaleToZeroAndBack(linger) })
}

// TestDeployment_ebpf rolls one where connections are translated in connect(), and by programs at devices. The proxy is
// killed meanwhile.
func TestDeployment_ebpf(t *testing.T) {
	lack.Need(t, lack.Fairlead)
	t.Parallel()
	w := newWorldIn(t, "ebpf", kubernetes.Options{})
	w.deployWeb(10 * time.Second) // on a busy machine the next process takes some seconds
	w.unbroken(func() {
		w.kubectl("set", "env", "deployment/web", "VERSION=2")
		if err := w.proxy.Kill(); err != nil {
			w.Fatal(err)
		}
		w.startProxy()
		w.rolledOut()
	})
}

// converse opens a connection and uses it all the time. It sends when it ended.
func (w *world) converse() <-chan time.Time {
	w.Helper()
	conn, err := w.bed.Dial(w.Context(), client, model.TCP, addresses()[0])
	if err != nil {
		w.Fatal(err)
	}
	w.cleanup(conn.Close)
	ended := make(chan time.Time, 1)
	go func() {
		pace := time.NewTicker(10 * time.Millisecond)
		defer pace.Stop()
		for line := make([]byte, 64); ; <-pace.C {
			_, err := conn.Read(line) // the first comes unasked
			if err == nil {
				_, err = conn.Write([]byte("\n"))
			}
			if err != nil {
				ended <- time.Now()
				return
			}
		}
	}()
	return ended
}

// step is a subtest in the same world.
func (w *world) step(name string, f func(*world)) {
	w.Run(name, func(t *testing.T) {
		inner := *w
		inner.T = t
		f(&inner)
		w.proxy = inner.proxy
	})
}

// scaleToZeroAndBack takes all pods away. While they drain they serve, then the Service refuses connections: no client
// waits for a timeout. When there is a first pod again, all connections reach one.
func (w *world) scaleToZeroAndBack(linger time.Duration) {
	w.Helper()
	start := time.Now()
	load := w.load()
	w.answers(load, 100)
	scaled := time.Now()
	w.kubectl("scale", "deployment/web", "--replicas=0")
	w.rolledOut()
	w.awaitEverywhere(testbed.Refused)
	for _, f := range load.Stop().Faults {
		if at := start.Add(f.Began); at.Before(scaled.Add(linger)) || f.What == testbed.TimedOut.String() {
			w.Errorf("%s after scaling: %s", at.Sub(scaled), f)
		}
	}
	empty := w.load()
	w.answers(empty, 200) // or refusals
	r := empty.Stop()
	for _, f := range r.Faults {
		if f.What != testbed.Refused.String() {
			w.Error("without pods: ", f)
		}
	}
	if r.Total().Answered > 0 || len(r.Faults) == 0 {
		w.Error("without pods: ", r)
	}
	w.kubectl("scale", "deployment/web", "--replicas=4")
	w.awaitEverywhere(testbed.Answered)
	w.unbroken(w.rolledOut)
}
