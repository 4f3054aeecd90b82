package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/testbed"
)

// The output of "kubectl get services,endpointslices -A -o yaml" for one Service. (Managed fields are not among it.)
const (
	serviceManifest = `- apiVersion: v1
  kind: Service
  metadata:
    annotations:
      kubectl.kubernetes.io/last-applied-configuration: |
        {"apiVersion":"v1","kind":"Service","metadata":{"annotations":{},"labels":{"app":"%[1]s"},"name":"%[1]s","namespace":"default"},"spec":{"ports":[{"name":"tcp","port":80,"targetPort":8080}],"selector":{"app":"%[1]s"}}}
    creationTimestamp: "2026-01-02T03:04:05Z"
    labels:
      app: %[1]s
    name: %[1]s
    namespace: default
    resourceVersion: "123456"
    uid: 0a9e9d9e-5c3b-4c3b-8a43-3a6d14a1c001
  spec:
    clusterIP: %[2]s
    clusterIPs:
    - %[2]s
    internalTrafficPolicy: Cluster
    ipFamilies:
    - IPv4
    ipFamilyPolicy: SingleStack
    ports:
    - name: tcp
      port: 80
      protocol: TCP
      targetPort: 8080
    selector:
      app: %[1]s
    sessionAffinity: None
    type: ClusterIP
  status:
    loadBalancer: {}
`
	sliceManifest = `- addressType: IPv4
  apiVersion: discovery.k8s.io/v1
  endpoints:
%[2]s  kind: EndpointSlice
  metadata:
    annotations:
      endpoints.kubernetes.io/last-change-trigger-time: "2026-01-02T03:04:05Z"
    creationTimestamp: "2026-01-02T03:04:05Z"
    generateName: %[1]s-
    generation: 7
    labels:
      app: %[1]s
      endpointslice.kubernetes.io/managed-by: endpointslice-controller.k8s.io
      kubernetes.io/service-name: %[1]s
    name: %[1]s-x7k2p
    namespace: default
    ownerReferences:
    - apiVersion: v1
      blockOwnerDeletion: true
      controller: true
      kind: Service
      name: %[1]s
      uid: 0a9e9d9e-5c3b-4c3b-8a43-3a6d14a1c001
    resourceVersion: "123456"
    uid: 0a9e9d9e-5c3b-4c3b-8a43-3a6d14a1c002
  ports:
  - name: tcp
    port: 8080
    protocol: TCP
`
	endpointManifest = `  - addresses:
    - %[2]s
    conditions:
      ready: true
      serving: true
      terminating: false
    nodeName: node-%[3]d
    targetRef:
      kind: Pod
      name: %[1]s-6d4cf56db6-%05[3]d
      namespace: default
      uid: 0a9e9d9e-5c3b-4c3b-8a43-3a6d14a1c003
    zone: zone-%[4]d
`
)

// manifests writes a fleet as one List, and returns the file's name.
func (f fleet) manifests(b *testing.B) string {
	b.Helper()
	name := filepath.Join(b.TempDir(), "all.yaml")
	file, err := os.Create(name)
	if err != nil {
		b.Fatal(err)
	}
	w := bufio.NewWriter(file)
	fmt.Fprintln(w, "apiVersion: v1\nitems:")
	for i := range f.services {
		fmt.Fprintf(w, serviceManifest, serviceName(i).Name, serviceAddr(i))
	}
	for i := range f.services {
		var endpoints strings.Builder
		for j, a := range f.endpoints(i) {
			n := (i + j) % 1000
			fmt.Fprintf(&endpoints, endpointManifest, serviceName(i).Name, a, n, n%3)
		}
		fmt.Fprintf(w, sliceManifest, serviceName(i).Name, endpoints.String())
	}
	fmt.Fprintln(w, "kind: List")
	if err := errors.Join(w.Flush(), file.Close()); err != nil {
		b.Fatal(err)
	}
	return name
}

// daemonVariable names the program once it is compiled, also to benchmarks in the test kernel.
const daemonVariable = "FAIRLEAD_BENCH_PROGRAM"

// buildDaemon compiles the program as it is released, and as kubernetes.BuildParts compiles kube-proxy.
func buildDaemon(b *testing.B) string {
	b.Helper()
	if program := os.Getenv(daemonVariable); program != "" {
		return program
	}
	program := filepath.Join(b.TempDir(), "fairlead")
	build := exec.CommandContext(b.Context(), "go", "build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w",
		"-o", program, "fairlead.dev/fairlead/cmd/fairlead")
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
	if out, err := build.CombinedOutput(); err != nil {
		b.Fatalf("%v\n%s", err, out)
	}
	return program
}

// figures of a daemon: one number of each run.
type figures struct {
	ready, programming, cpu, again Series // seconds
	peak, settled                  Series // bytes
}

// settleTime is how long the daemon is left alone before its memory counts as settled.
const settleTime = 3 * time.Second

// run starts the daemon in an empty kernel and again over what the first one left.
func (f *figures) run(b *testing.B, program, manifests string) error {
	bed, err := testbed.New(b.Context(), testbed.Spec{})
	if err != nil {
		return err
	}
	defer bed.Close()
	d := daemon{bed: bed, args: []string{
		program, "run", "--manifests", manifests, "--hostname-override", string(testbed.Node),
		"--cluster-cidr", testbed.ClusterCIDRs()[0].String(), "--healthz-bind-address", healthz, "--control-socket", "",
	}}
	if err := f.first(b.Context(), &d); err != nil {
		return err
	}
	ready, err := d.start(b.Context())
	f.again = append(f.again, ready.Seconds())
	return errors.Join(err, d.stop())
}

func (f *figures) first(ctx context.Context, d *daemon) error {
	ready, err := d.start(ctx)
	if err != nil {
		return err
	}
	cpu, err := d.cpu()
	if err != nil {
		return err
	}
	letPass(settleTime)
	memory, err := d.memory()
	if err != nil {
		return err
	}
	f.ready, f.cpu = append(f.ready, ready.Seconds()), append(f.cpu, cpu.Seconds())
	f.peak, f.settled = append(f.peak, memory["VmHWM"]), append(f.settled, memory["VmRSS"])
	if err := d.stop(); err != nil {
		return err
	}
	took, err := d.programming()
	f.programming = append(f.programming, took.Seconds())
	return err
}

// daemon is the program on the node of a cluster.
type daemon struct {
	bed  *testbed.Bed
	args []string
	cmd  *testbed.Cmd
	log  strings.Builder
}

const healthz = "127.0.0.1:10256"

// start returns when the kernel is programmed, and how long that took.
func (d *daemon) start(ctx context.Context) (time.Duration, error) {
	d.cmd = d.bed.Command(ctx, testbed.Node, d.args[0], d.args[1:]...)
	d.cmd.Stderr = &d.log
	began := time.Now()
	if err := d.cmd.Start(); err != nil {
		return 0, err
	}
	client := http.Client{Transport: &http.Transport{DialContext: d.dial}, Timeout: time.Second}
	glance := time.NewTicker(time.Millisecond) // so exactly the start is measured
	defer glance.Stop()
	for ; time.Since(began) < time.Minute; <-glance.C {
		answer, err := client.Get("http://" + healthz + "/livez")
		if err == nil {
			answer.Body.Close()
			if answer.StatusCode == http.StatusOK {
				return time.Since(began), nil
			}
		}
	}
	return 0, fmt.Errorf("the daemon is not ready after a minute:\n%s", d.log.String())
}

func (d *daemon) dial(_ context.Context, network, address string) (c net.Conn, err error) {
	err = d.bed.Do(testbed.Node, func() (err error) {
		c, err = net.Dial(network, address)
		return err
	})
	return c, err
}

func (d *daemon) stop() error {
	if err := d.cmd.Process.Signal(unix.SIGTERM); err != nil {
		return err
	}
	if err := d.cmd.Wait(); err != nil {
		return fmt.Errorf("%w:\n%s", err, d.log.String())
	}
	return nil
}

// programming is what the daemon's log says of how long the first Sync took.
func (d *daemon) programming() (time.Duration, error) {
	_, line, _ := strings.Cut(d.log.String(), "msg=programmed ")
	line, _, _ = strings.Cut(line, "\n")
	_, took, _ := strings.Cut(line, "took=")
	return time.ParseDuration(took)
}

// cpu is the processor time that the daemon has used, in ticks of 10 ms: see proc_pid_stat(5).
func (d *daemon) cpu() (time.Duration, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", d.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(text))
	user, err1 := strconv.Atoi(fields[13])
	system, err2 := strconv.Atoi(fields[14])
	return time.Duration(user+system) * 10 * time.Millisecond, errors.Join(err1, err2)
}

// memory are the figures of /proc/PID/status that are sizes, in bytes.
func (d *daemon) memory() (map[string]float64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.cmd.Process.Pid))
	if err != nil {
		return nil, err
	}
	sizes := map[string]float64{}
	for line := range strings.Lines(string(text)) {
		var name string
		var size float64
		if n, _ := fmt.Sscanf(line, "%s %f kB", &name, &size); n == 2 {
			sizes[strings.TrimSuffix(name, ":")] = size * 1024
		}
	}
	return sizes, nil
}

// BenchmarkDaemon is the whole program, started with the output of kubectl: until the kernel is
// programmed, and the memory that it takes.
func BenchmarkDaemon(b *testing.B) {
	program := buildDaemon(b)
	sizes := [][2]int{{0, 0}, {1000, 10}, {10_000, 10}, {44_000, 1}, {5000, 50}}
	all, manifests := map[[2]int]*figures{}, map[[2]int]string{}
	for _, n := range sizes {
		all[n], manifests[n] = &figures{}, fleet{services: n[0], endpoints: apart(n[1])}.manifests(b)
	}
	for next := rounds(b, 3); next(); {
		for _, n := range sizes {
			if err := all[n].run(b, program, manifests[n]); err != nil {
				b.Fatal(err)
			}
		}
	}
	rows := [][]string{{"Services × endpoints", "start to programmed", "of which programming", "processor time",
		"restart to programmed", "peak (VmHWM)", "settled (VmRSS)"}}
	for _, n := range sizes {
		f, name := all[n], fmt.Sprintf("%d × %d", n[0], n[1])
		rows = append(rows, []string{name, show(f.ready.Duration()), show(f.programming.Duration()), show(f.cpu.Duration()),
			show(f.again.Duration()), megabytes(f.peak), megabytes(f.settled)})
		b.ReportMetric(Series(f.peak).Median()/1e6, "MB:peak-"+compact(name))
		b.ReportMetric(Series(f.settled).Median()/1e6, "MB:settled-"+compact(name))
	}
	printTable(fmt.Sprintf("fairlead run: median of %d runs", len(all[sizes[0]].ready)), rows...)
}

func megabytes(s Series) string { return fmt.Sprintf("%.1f MB", Series(s).Median()/1e6) }
