package kubernetes

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/testbed"
)

// ProxyOptions say which service proxy to start on the node of a Bed.
type ProxyOptions struct {
	Bed     *testbed.Bed
	Place   testbed.Place // empty: the node
	Command []string      // program and arguments
	Env     []string      // beside this process's
	Log     io.Writer     // gets what the proxy writes, beside Proxy.Log; may be nil
}

// Proxy is a service proxy that runs on a node of a Bed. It ends with the Bed at the latest.
type Proxy struct {
	cmd   *testbed.Cmd
	bed   *testbed.Bed
	place testbed.Place
	log   testbed.Output
	ended chan struct{}
	err   error

	mu        sync.Mutex
	childPeak uint64
}

// KubeProxyCommand is the real kube-proxy, in a mode (iptables, nftables, ipvs), as kubeadm would have it
// run on the node of a testbed.
func KubeProxyCommand(p Parts, kubeconfig, mode string) []string {
	return append([]string{p.Path("kube-proxy")}, ProxyArgs(kubeconfig, mode)...)
}

// ProxyArgs are those of kube-proxy, which Fairlead understands as well.
func ProxyArgs(kubeconfig, mode string) []string {
	return []string{
		"--kubeconfig=" + kubeconfig, "--proxy-mode=" + mode,
		"--hostname-override=" + string(testbed.Node), "--cluster-cidr=" + testbed.ClusterCIDR(),
		// The machine's own settings, which a namespace cannot change.
		"--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0",
	}
}

// StartProxy starts a proxy; Ready says when it serves, which the proxy tells at 127.0.0.1:10256.
func StartProxy(ctx context.Context, o ProxyOptions) (*Proxy, error) {
	p := &Proxy{bed: o.Bed, place: cmp.Or(o.Place, testbed.Node), ended: make(chan struct{})}
	p.cmd = o.Bed.Command(ctx, p.place, o.Command[0], o.Command[1:]...)
	p.cmd.Env = append(os.Environ(), o.Env...)
	var out io.Writer = &p.log
	if o.Log != nil {
		out = io.MultiWriter(out, o.Log)
	}
	p.cmd.Stdout, p.cmd.Stderr = out, out
	p.cmd.SysProcAttr.Setpgid = true // an interrupt at this process's terminal leaves it the proxies
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", o.Command[0], err)
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.ended)
	}()
	go p.watchChildren()
	return p, nil
}

// Ready returns when /healthz answers 200.
func (p *Proxy) Ready(ctx context.Context) error {
	if _, limited := ctx.Deadline(); !limited {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, startPatience)
		defer cancel()
	}
	healthz := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), 10256)
	return p.Await(ctx, "the proxy is not ready", func(ctx context.Context) (bool, error) {
		status, _, err := p.Get(ctx, healthz, "/healthz")
		return err == nil && status == http.StatusOK, nil // it may not listen yet
	})
}

// Await tries until there is an error or what is awaited. If the proxy or ctx ends before, the error says what there is
// instead, and the last words of the proxy.
func (p *Proxy) Await(ctx context.Context, instead string, try func(context.Context) (bool, error)) error {
	for {
		if done, err := try(ctx); done || err != nil {
			return err
		}
		select {
		case <-p.ended:
			return p.WithLastWords(errProxyEnded)
		case <-ctx.Done():
			return p.WithLastWords(fmt.Errorf("%s: %w", instead, context.Cause(ctx)))
		case <-time.After(time.Millisecond): // no event announces it
		}
	}
}

var errProxyEnded = errors.New("the proxy has ended")

// Check says that the proxy has ended.
func (p *Proxy) Check() error {
	select {
	case <-p.ended:
		return p.WithLastWords(errProxyEnded)
	default:
		return nil
	}
}

// LastWords is an error, and what the proxy has written last.
type LastWords struct {
	error
	log string
}

// WithLastWords adds what the proxy has written last.
func (p *Proxy) WithLastWords(err error) error { return LastWords{err, strings.TrimSpace(p.Log())} }

func (w LastWords) Unwrap() error { return w.error }

func (w LastWords) Error() string {
	const most = 2000
	return fmt.Sprintf("%s; its last words:\n%s", w.error, w.log[max(0, len(w.log)-most):])
}

// Line is the last one, without the date that klog puts before it.
func (w LastWords) Line() string {
	line := w.log[strings.LastIndexByte(w.log, '\n')+1:]
	if head, text, ok := strings.Cut(line, "] "); ok && len(strings.Fields(head)) == 4 {
		return text
	}
	return line
}

// Get asks an HTTP server on the node.
func (p *Proxy) Get(ctx context.Context, addr netip.AddrPort, path string) (status int, body []byte, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr.String()+path, nil)
	if err != nil {
		return 0, nil, err
	}
	response, err := p.bed.HTTPClient(p.place).Do(request)
	if err != nil {
		return 0, nil, err
	}
	defer response.Body.Close()
	body, err = io.ReadAll(response.Body)
	return response.StatusCode, body, err
}

// Pid is the process's.
func (p *Proxy) Pid() int { return p.cmd.Process.Pid }

// Log is what the proxy has written so far.
func (p *Proxy) Log() string { return p.log.String() }

// Ended is closed when the proxy has ended.
func (p *Proxy) Ended() <-chan struct{} { return p.ended }

// Kill ends the proxy by SIGKILL and returns when it has ended.
func (p *Proxy) Kill() error { return p.signal(unix.SIGKILL) }

// Terminate asks the proxy to end and returns when it has. An exit status other than 0 is an error.
func (p *Proxy) Terminate() error {
	if err := p.signal(unix.SIGTERM); err != nil {
		return err
	}
	return p.err
}

// Signal sends any signal.
func (p *Proxy) Signal(s os.Signal) error { return p.cmd.Process.Signal(s) }

func (p *Proxy) signal(s os.Signal) error {
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-p.ended:
		return nil
	case <-time.After(startPatience):
		return fmt.Errorf("%s did not end after %s\n%s", p.cmd.Path, s, p.Log())
	}
}

// Usage is what a process has used so far.
type Usage struct {
	CPU       time.Duration // with that of its children that have ended
	RSS       uint64        // bytes resident now
	Anonymous uint64        // of these, what is not of files: the heap, stacks; the rest is of the program
	Peak      uint64        // bytes resident at most (VmHWM)
	ChildPeak uint64        // the same of its largest child, as far as was seen, see StartProxy
}

// Usage of a proxy that runs.
func (p *Proxy) Usage() (Usage, error) {
	u, err := usageOf(p.Pid())
	p.mu.Lock()
	defer p.mu.Unlock()
	u.ChildPeak = p.childPeak
	return u, err
}

// usageOf a process, but for the size of its children.
func usageOf(pid int) (Usage, error) {
	proc, err := procfs.NewProc(pid)
	if err != nil {
		return Usage{}, err
	}
	stat, err := proc.Stat()
	if err != nil {
		return Usage{}, err
	}
	status, err := proc.NewStatus()
	if err != nil {
		return Usage{}, err
	}
	const ticks = 100 // USER_HZ, the unit of /proc, on every architecture that Go knows
	used := int64(stat.UTime) + int64(stat.STime) + int64(stat.CUTime) + int64(stat.CSTime)
	return Usage{
		CPU: time.Duration(used) * time.Second / ticks,
		RSS: status.VmRSS, Anonymous: status.RssAnon, Peak: status.VmHWM,
	}, nil
}

// watchChildren notes the size of the programs that the proxy runs, which nothing tells afterwards. One
// that runs for less than the interval may be missed, but such a one is small.
func (p *Proxy) watchChildren() {
	const interval = 50 * time.Millisecond
	for {
		select {
		case <-p.ended:
			return
		case <-time.After(interval):
		}
		for _, child := range children(p.Pid()) {
			proc, err := procfs.NewProc(child)
			if err != nil {
				continue // it has ended
			}
			if status, err := proc.NewStatus(); err == nil {
				p.mu.Lock()
				p.childPeak = max(p.childPeak, status.VmHWM)
				p.mu.Unlock()
			}
		}
	}
}

// children are the processes that the threads of another have started.
func children(pid int) (pids []int) {
	lists, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, name := range lists {
		list, err := os.ReadFile(name)
		if err != nil {
			continue
		}
		for r := bytes.NewReader(list); ; {
			var child int
			if _, err := fmt.Fscan(r, &child); err != nil {
				break
			}
			pids = append(pids, child)
		}
	}
	return pids
}
