package userspace_test

import (
	"net"
	"os"
	"runtime"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane/userspace"
	"fairlead.dev/fairlead/lab/eventually"
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

// BenchmarkFlows has clients begin flows of UDP side by side, each with a question, until all have their answers.
func BenchmarkFlows(b *testing.B) {
	for _, way := range []userspace.Redirect{userspace.ByTPROXY, userspace.ByNAT} {
		b.Run(string(way), func(b *testing.B) {
			const flows = 200
			n := start(b, userspace.Options{Redirect: way})
			n.sync("udp", n.echo())
			for b.Loop() {
				var all []net.Conn
				for range flows {
					all = append(all, n.question())
				}
				for _, c := range all {
					if _, err := c.Read(make([]byte, 1)); err != nil {
						b.Fatal(err)
					}
					c.Close()
				}
			}
			b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N*flows), "µs/flow")
		})
	}
}

// echo has pod-a answer datagrams with themselves.
func (n *node) echo() (backend string) {
	n.Helper()
	socket := n.listenDatagrams()
	go func() {
		buf := make([]byte, 1)
		for {
			_, from, err := socket.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = socket.WriteTo(buf, from) // the client sees what fails
		}
	}()
	return socket.LocalAddr().String()
}

// question sends a datagram from a port of its own.
func (n *node) question() (c net.Conn) {
	n.Helper()
	n.at("client", func() (err error) {
		if c, err = net.Dial("udp4", service); err == nil {
			_, err = c.Write([]byte("?"))
		}
		return err
	})
	if err := c.SetDeadline(time.Now().Add(eventually.Patience())); err != nil {
		n.Fatal(err)
	}
	return c
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
