package userspace_test

import (
	"net"
	"os"
	"runtime"
	"testing"

	"fairlead.dev/fairlead/dataplane/userspace"
)

// BenchmarkOpen opens connections that say something and are then silent: what each takes of this process beside the
// same connection without the plane. (Client and backend are of this process, too.)
func BenchmarkOpen(b *testing.B) {
	const connections = 1000
	for b.Loop() {
		n := start(b, userspace.Options{})
		echo := n.listen(func(c *net.TCPConn) {
			b.Cleanup(func() { c.Close() })
			buf := make([]byte, 1)
			if _, err := c.Read(buf); err == nil {
				_, _ = c.Write(buf) // the client sees what fails
			}
		})
		n.sync("tcp", echo)
		before := usage(b)
		n.open(connections, echo)
		direct := usage(b)
		n.open(connections, service)
		served := usage(b)
		b.ReportMetric(float64(served.bytes-direct.bytes-(direct.bytes-before.bytes))/connections, "B/connection")
		b.ReportMetric(float64(served.files-direct.files-(direct.files-before.files))/connections, "files/connection")
	}
}

// open opens connections from the client's pod, and has one byte go to and fro over each.
func (n *node) open(connections int, to string) {
	n.Helper()
	for range connections {
		c := n.dialTo(to)
		buf := []byte("x")
		_, err := c.Write(buf)
		if err == nil {
			_, err = c.Read(buf)
		}
		if err != nil {
			n.Fatal(err)
		}
	}
}

type used struct{ bytes, files int }

func usage(b *testing.B) used {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		b.Fatal(err)
	}
	return used{int(m.HeapAlloc + m.StackInuse), len(files)}
}
