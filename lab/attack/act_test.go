package attack

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"

	"golang.org/x/sys/unix"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// offer is a Service of the attacker with its endpoints.
type offer struct {
	*corev1.Service
	endpoints []netip.Addr // of IPv4; nil: the attacker's pods, in both families
	weights   []int        // of these
	written   string       // an endpoint's address, as it is written; empty: those
	owner     string       // what slices say whose they are; empty: the Service's name
}

// many has the attacker offer so many Services.
func many(n int, change func(i int, o *offer)) func(*stage) {
	return func(s *stage) {
		var all []runtime.Object
		for i := range n {
			o := &offer{Service: service(tenant, fmt.Sprintf("s-%d", i), []netip.Addr{
				nth("10.96.128.1", i), nth(testbed.EmbedV6(netip.MustParseAddr("10.96.128.1")).String(), i),
			}, evilPort)}
			change(i, o)
			all = append(all, o.objects(s)...)
		}
		s.set(tenant, all...)
	}
}

// one has the attacker offer one.
func one(change func(o *offer)) func(*stage) { return many(1, func(_ int, o *offer) { change(o) }) }

// objects are a Service and its slices, none of which is larger than the API allows.
func (o *offer) objects(s *stage) []runtime.Object {
	all := s.of(o.Service, evil, lurker)
	if o.endpoints != nil {
		all = nil
		const most = 1000
		for some := range slices.Chunk(o.endpoints, most) {
			e := slice(o.Service, some...)
			e.Name += fmt.Sprintf("-%d", len(all))
			all = append(all, e)
		}
	}
	for _, e := range all {
		o.finish(e.(*discoveryv1.EndpointSlice))
	}
	return append(all, o.Service)
}

func (o *offer) finish(e *discoveryv1.EndpointSlice) {
	if o.owner != "" {
		e.Labels[discoveryv1.LabelServiceName] = o.owner
	}
	if o.written != "" {
		e.Endpoints[0].Addresses[0] = o.written
	}
	var weights []string
	for i := range min(len(o.weights), len(e.Endpoints)) {
		weights = append(weights, fmt.Sprintf("%s=%d", e.Endpoints[i].Addresses[0], o.weights[i]))
	}
	if weights != nil {
		e.Annotations = map[string]string{"fairlead.dev/weights": strings.Join(weights, ",")}
	}
}

// ports gives it so many.
func (o *offer) ports(n int) *offer {
	o.Spec.Ports = nil
	for i := range n {
		o.Spec.Ports = append(o.Spec.Ports, corev1.ServicePort{
			Name: fmt.Sprintf("p%d", i), Port: int32(1 + i), TargetPort: intstr.FromInt32(evilPort),
		})
	}
	return o
}

// light leaves it one port and one family.
func (o *offer) light() {
	o.Spec.Ports, o.Spec.ClusterIPs, o.Spec.IPFamilies = o.Spec.Ports[:1], o.Spec.ClusterIPs[:1], o.Spec.IPFamilies[:1]
}

// ranges lets so many use its load balancer's addresses.
func (o *offer) ranges(n int) {
	exposed(o.Service, 31778, both("203.0.113.77")...)
	for i := range n {
		o.Spec.LoadBalancerSourceRanges = append(o.Spec.LoadBalancerSourceRanges, fmt.Sprintf("%s/30", nth("172.16.0.0", 8*i)))
	}
	for i := range o.Spec.Ports {
		o.Spec.Ports[i].NodePort = 0
	}
}

// older makes it the first one to claim what it claims.
func (o *offer) older() {
	o.CreationTimestamp = metav1.NewTime(time.Date(2001, 1, 1, 0, 0, 0, 0, time.UTC))
}

// at gives it ClusterIPs.
func (o *offer) at(addrs ...netip.Addr) {
	o.Spec.ClusterIP, o.Spec.ClusterIPs = addrs[0].String(), texts(addrs...)
}

func timeout(seconds int) *corev1.SessionAffinityConfig {
	n := int32(seconds)
	return &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &n}}
}

// addresses are so many, from one on.
func addresses(first string, skip, n int) (all []netip.Addr) {
	for i := range n {
		all = append(all, nth(first, skip+i))
	}
	return all
}

// primes are the n greatest ones below a number.
func primes(n, below int) (all []int) {
	for p := below - 1; len(all) < n; p-- {
		if isPrime(p) {
			all = append(all, p)
		}
	}
	return all
}

func isPrime(n int) bool {
	for d := 2; d*d <= n; d++ {
		if n%d == 0 {
			return false
		}
	}
	return n > 1
}

// text has the attacker write a manifest.
func text(make func() string) func(*stage) {
	return func(s *stage) {
		if err := s.objects.(directory).write(tenant, make()); err != nil {
			s.Fatal(err)
		}
	}
}

// during does something so many times a second for a time.
func (s *stage) during(d time.Duration, perSecond int, do func(n int)) {
	pace := time.NewTicker(time.Second / time.Duration(perSecond))
	defer pace.Stop()
	for n, begin := 0, time.Now(); time.Since(begin) < d; n++ {
		do(n)
		<-pace.C
	}
}

// rewrite writes a file in place for three seconds, so that a reader finds a part of it.
func rewrite(s *stage) {
	whole, err := manifest((&offer{Service: service(tenant, "s-0", both("10.96.128.1"), evilPort)}).objects(s))
	if err != nil {
		s.Fatal(err)
	}
	for n, begin := 0, time.Now(); time.Since(begin) < 3*time.Second; n++ {
		file := s.objects.(directory).file(tenant)
		if err := os.WriteFile(file, []byte(whole[:len(whole)*(n%8+1)/8]), 0o644); err != nil {
			s.Fatal(err)
		}
	}
}

// strangeFiles makes what is no manifest, but has the name of one.
func strangeFiles(s *stage) {
	file := s.objects.(directory).file
	huge := file("evil-huge")
	err := errors.Join(
		unix.Mkfifo(file("evil-pipe"), 0o644),
		os.Symlink("/dev/zero", file("evil-zero")),
		os.Symlink("/proc/self/mem", file("evil-memory")),
		os.Symlink(filepath.Base(file("evil-loop")), file("evil-loop")),
		os.Mkdir(file("evil-directory"), 0o755),
		os.WriteFile(huge, nil, 0o644), os.Truncate(huge, 3<<30),
		os.WriteFile(file("evil-secret"), nil, 0),
		os.WriteFile(file("evil-binary"), []byte{0xff, 0xfe, 0, 0x80}, 0o644),
	)
	if err != nil {
		s.Fatal(err)
	}
}

// manyFiles makes a manifest of each Service.
func manyFiles(s *stage) {
	for i := range 5000 {
		o := &offer{Service: service(tenant, fmt.Sprintf("s-%d", i), []netip.Addr{nth("10.96.128.1", i)}, evilPort)}
		s.set(fmt.Sprintf("evil-%d", i), o.objects(s)...)
	}
}

// ages makes objects and files of other times.
func ages(s *stage) {
	for i, year := range []int{1, 1969, 1970, 2262, 9999} {
		o := &offer{Service: service(tenant, fmt.Sprintf("s-%d", i), []netip.Addr{nth("10.96.128.1", i)}, evilPort)}
		at := time.Date(year, 1, 1, 0, 0, 0, 0, time.UTC)
		o.CreationTimestamp = metav1.NewTime(at)
		name := fmt.Sprintf("evil-%d", i)
		s.set(name, o.objects(s)...)
		if err := os.Chtimes(s.objects.(directory).file(name), at, at); err != nil {
			s.Fatal(err)
		}
	}
}

// held are connections that are kept until the test ends.
type held struct {
	mu    sync.Mutex
	conns []io.Closer
}

func (h *held) add(c io.Closer) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.conns = append(h.conns, c)
}

// holding is of the stage that holds connections: this process has no files for more than one of them.
var holding sync.Mutex

func (s *stage) held() *held {
	if !s.holds {
		holding.Lock()
		s.Cleanup(holding.Unlock)
		s.holds = true
	}
	h := &held{}
	s.Cleanup(func() {
		for _, c := range h.conns {
			_ = c.Close()
		}
	})
	return h
}

// hold opens connections all at once, sends a text on each, and keeps them. It ignores those that no one takes. One thread
// does all that, so that the processor is left to the attacked.
func (s *stage) hold(from testbed.Place, to netip.AddrPort, n int, text string) {
	h, begin := s.held(), time.Now()
	const most = 3 * time.Second
	var all []*os.File
	err := s.bed.Do(from, func() error {
		for range n {
			f, err := connecting(to)
			if err != nil {
				return err
			}
			h.add(f)
			all = append(all, f)
		}
		return nil
	})
	if err != nil {
		s.Log(err)
	}
	open := all[:0]
	for _, f := range all {
		_ = f.SetDeadline(begin.Add(most))
		if isConnected(f) {
			_, _ = io.WriteString(f, text)
			open = append(open, f)
		}
	}
	s.Logf("%d of %d connections from %s to %s are open after %s", len(open), n, from, to, time.Since(begin).Round(time.Millisecond))
	s.during(time.Second, 4, func(int) {
		for _, f := range open {
			if text != "" {
				_ = f.SetDeadline(time.Now().Add(time.Millisecond))
				_, _ = f.Write([]byte("a"))
			}
		}
	})
}

// connecting is a socket of the calling thread's namespace that begins to connect.
func connecting(to netip.AddrPort) (*os.File, error) {
	family, port := unix.AF_INET6, int(to.Port())
	var address unix.Sockaddr = &unix.SockaddrInet6{Port: port, Addr: to.Addr().As16()}
	if to.Addr().Is4() {
		family, address = unix.AF_INET, &unix.SockaddrInet4{Port: port, Addr: to.Addr().As4()}
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	_ = unix.Connect(fd, address)
	return os.NewFile(uintptr(fd), to.String()), nil
}

// isConnected waits for the end of that, until the deadline.
func isConnected(f *os.File) bool {
	raw, err := f.SyscallConn()
	if err != nil {
		return false
	}
	var failed error
	err = raw.Write(func(fd uintptr) (done bool) {
		var left int
		left, failed = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		if failed == nil && left != 0 {
			failed = unix.Errno(left)
		}
		if failed == nil {
			_, failed = unix.Getpeername(int(fd))
		}
		return !errors.Is(failed, unix.ENOTCONN)
	})
	return err == nil && failed == nil
}

// flows sends a datagram from so many sockets, and keeps them.
func (s *stage) flows(from testbed.Place, to netip.AddrPort, n int) {
	h := s.held()
	for range n {
		c, err := s.bed.Dial(s.Context(), from, model.UDP, to)
		if err != nil {
			s.Log(err)
			return
		}
		h.add(c)
		_, _ = io.WriteString(c, "?\n")
	}
}

// visit connects, and waits for what comes of it.
func (s *stage) visit(from testbed.Place, to netip.AddrPort, n int) {
	for i := range n {
		for _, p := range []model.Protocol{model.TCP, model.UDP} {
			_, err := s.bed.Probe(s.Context(), testbed.Probe{From: from, To: to, Protocol: p, Timeout: 100 * time.Millisecond})
			if err != nil {
				s.Log(i, err)
			}
		}
	}
}

// sockets has sockets of a pod that are not connected ask two Services each.
func (s *stage) sockets(from testbed.Place, n int) {
	h := s.held()
	err := s.bed.Do(from, func() error {
		for range n {
			c, err := net.ListenUDP("udp4", nil)
			if err != nil {
				return err
			}
			h.add(c)
			for _, to := range []string{baseIP, dnsIP} {
				_, _ = c.WriteToUDPAddrPort([]byte("?\n"), netip.AddrPortFrom(netip.MustParseAddr(to), 80))
			}
		}
		return nil
	})
	if err != nil {
		s.Fatal(err)
	}
}

// nobodyElse is a user without rights.
const nobodyElse = 65534

// orderAround has another user try what only root may: to give orders, and to keep the socket busy.
func (s *stage) orderAround() {
	for _, order := range []string{"switch", "audit", "dump", "status"} {
		args := []string{"--reuid=65534", "--clear-groups", "--", agent, order, "--control-socket", s.control}
		if order == "switch" {
			args = append(args, string(planes[0]))
		}
		if out, err := s.run("setpriv", args...); err == nil {
			s.Errorf("another user may %s:\n%s", order, out)
		}
	}
	h := s.held()
	err := s.bed.Do(testbed.Node, func() error {
		// Of this thread alone, which ends with the function.
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, nobodyElse, nobodyElse, nobodyElse); errno != 0 {
			return errno
		}
		for range 1000 {
			fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
			if err != nil {
				return err
			}
			h.add(os.NewFile(uintptr(fd), "control"))
			err = unix.Connect(fd, &unix.SockaddrUnix{Name: s.control})
			if !errors.Is(err, unix.EACCES) {
				return fmt.Errorf("another user connects to the control socket: %w", err)
			}
		}
		return nil
	})
	if err != nil {
		s.Error(err)
	}
}

// second starts another proxy, which ends and says why.
func (s *stage) second() {
	command := s.command()
	swap := map[string]string{s.control: s.control + "-2", metrics.String(): "127.0.0.1:11249", "0.0.0.0:10256": "0.0.0.0:11256"}
	for i, word := range command {
		if other, ok := swap[word]; ok {
			command[i] = other
		}
	}
	out, err := s.run(command[0], command[1:]...)
	if want := fmt.Sprintf("process %d", s.proxy.Pid()); err == nil || !strings.Contains(out, want) {
		s.Errorf("a second proxy: %v, and no %q in\n%s", err, want, out)
	}
}

// churn changes rules that are not the proxy's.
func (s *stage) churn() {
	nft := s.bed.Command(s.Context(), testbed.Node, "nft", "-i")
	in, err := nft.StdinPipe()
	if err == nil {
		err = nft.Start()
	}
	if err != nil {
		s.Fatal(err)
	}
	s.during(3*time.Second, 50, func(n int) {
		fmt.Fprintf(in, "add table ip other-%d\nadd chain ip other-%d c { type filter hook input priority 0; }\n", n, n)
		fmt.Fprintf(in, "delete table ip other-%d\n", n)
	})
	if err := errors.Join(in.Close(), nft.Wait()); err != nil {
		s.Error(err)
	}
}

// told finds that Events name what is the attacker's, and that there are not many.
func told(s *stage) (wrong []string) {
	var events []string
	err := eventually.Poll(s.Context(), func() error {
		events = s.objects.(*server).written()
		if !slices.ContainsFunc(events, func(note string) bool { return strings.Contains(note, named[0]) }) {
			return fmt.Errorf("no Event names %s: %q", named[0], events)
		}
		return nil
	})
	if err != nil {
		wrong = append(wrong, err.Error())
	}
	const most = 100
	if len(events) > most {
		wrong = append(wrong, fmt.Sprintf("%d Events, want at most %d", len(events), most))
	}
	return wrong
}

// usedUp finds that mode ebpf, whose tables namespaces share, names the attacker's namespace as one without room.
func usedUp(s *stage) (wrong []string) {
	if s.on != ebpf {
		return nil
	}
	err := untilTold.Poll(s.Context(), func() error {
		if status := s.status(); !strings.Contains(status, "Namespace "+tenant) || !strings.Contains(status, "sessions on this node") {
			return fmt.Errorf("fairlead status does not say that %s has used up its share of sessions:\n%s", tenant, status)
		}
		return nil
	})
	if err != nil {
		wrong = append(wrong, err.Error())
	}
	return wrong
}

// answers finds that an address is answered by pods of a name.
func answers(address, name string) func(*stage) []string {
	return func(s *stage) (wrong []string) {
		for range 10 {
			to := netip.AddrPortFrom(netip.MustParseAddr(address), 80)
			o, err := s.bed.Probe(s.Context(), testbed.Probe{From: client, To: to})
			if err != nil || !strings.HasPrefix(o.Backend, name) {
				wrong = append(wrong, fmt.Sprintf("%s is answered by %s, %v", to, o, err))
			}
		}
		return wrong
	}
}

// silent expects that no pod answers at an address.
func silent(address string) func(*stage) []string {
	return func(s *stage) []string {
		to := netip.AddrPortFrom(netip.MustParseAddr(address), 80)
		o, err := s.bed.Probe(s.Context(), testbed.Probe{From: client, To: to})
		if err == nil && o.Result != testbed.Answered {
			return nil
		}
		return []string{fmt.Sprintf("%s is answered: %s, %v", to, o, err)}
	}
}

// fewSeries finds that what is measured does not grow with what a tenant makes.
func fewSeries(s *stage) []string {
	out, err := s.page(s.Context(), metrics, "/metrics")
	const most = 1 << 20
	if err == nil && len(out) < most {
		return nil
	}
	return []string{fmt.Sprintf("/metrics has %d bytes, %v", len(out), err)}
}

// collisions are addresses whose bit is that of the pods' addresses in the table of mode ebpf that says of which
// addresses anything is known (dataplane/ebpf/regions.go).
func collisions(n int) (all []string) {
	hash := func(a [4]byte) uint32 {
		high := uint32(0xffff0000)
		high = high*41 + uint32(a[0])
		return (uint32(a[0])<<16 | uint32(a[1])<<8 | uint32(a[2])) ^ high*0x9e3779b1>>16&0xffff
	}
	for first := byte(20); len(all) < n; first++ {
		pods := hash([4]byte{10, 244, 1}) & 0xffff
		rest := (pods ^ hash([4]byte{first})) & 0xffff
		for last := range byte(10) {
			all = append(all, netip.AddrFrom4([4]byte{first, byte(rest >> 8), byte(rest), 1 + last}).String())
		}
	}
	return all
}

// listable finds that the machine's tools can list what is in the kernel, and that nothing looks like other rules there.
func listable(s *stage) (wrong []string) {
	for _, command := range []string{"nft list ruleset", "nft -j list ruleset", agent + " dump --control-socket " + s.control} {
		words := strings.Fields(command)
		out, err := s.run(words[0], words[1:]...)
		at := strings.IndexFunc(out, func(r rune) bool { return unicode.IsControl(r) && r != '\n' && r != '\t' })
		if at < 0 {
			at = strings.Index(out, "msg=forged")
		}
		if err != nil || at >= 0 {
			wrong = append(wrong, fmt.Sprintf("%s: %v: %.500q", command, err, out[max(0, at-200):]))
		}
	}
	return wrong
}
