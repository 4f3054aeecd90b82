package external

import (
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed/nstest"
)

// run runs a command in the namespace of the calling thread.
func run(t *testing.T, words ...string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), words[0], words[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v %s", strings.Join(words, " "), err, out)
	}
}

// open listens. Without the right to read audit records it hears the rest.
func open(t *testing.T) *Watch {
	w, err := Open()
	if err != nil && !strings.Contains(err.Error(), "audit records") {
		t.Fatal(err)
	}
	t.Cleanup(w.Close)
	return w
}

// next is the next change that others than this process make.
func (w *Watch) next(t *testing.T) dataplane.ExternalChange {
	t.Helper()
	return eventually.Receive(t, "a change", w.changes)
}

func TestWatch(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		run(t, "ip", "link", "set", "lo", "up")
		w := open(t)
		for _, c := range []struct{ before, act, what, who string }{
			{"nft add table ip mine", "nft add table ip fairlead", "added table ip fairlead", "nft"},
			{"", "nft add chain ip fairlead services", "added chain services of table ip fairlead", "nft"},
			{"", "nft add rule ip fairlead services drop", "added a rule of chain services of table ip fairlead", "nft"},
			{"", "nft add set ip fairlead s { type ipv4_addr; }", "added set s of table ip fairlead", "nft"},
			{"", "nft add element ip fairlead s { 10.0.0.1, 10.0.0.2 }", "added an element of set s of table ip fairlead", "nft"},
			{"", "nft flush ruleset", "deleted table ip fairlead", "nft"},
			{
				"ip route add local 10.96.0.0/16 dev lo table local proto 250",
				"ip route del local 10.96.0.0/16 dev lo table local", "deleted route 10.96.0.0/16", "ip",
			},
			{
				"ip rule add fwmark 1 lookup 17985 priority 99 protocol 250",
				"ip rule del priority 99", "deleted rule 99", "ip",
			},
		} {
			if c.before != "" {
				run(t, strings.Fields(c.before)...)
			}
			run(t, strings.Fields(c.act)...)
			f := w.next(t)
			if !strings.HasPrefix(f.What, c.what) {
				t.Errorf("%s: %+v", c.act, f)
			}
			if c.who == "nft" && (f.Process != c.who || f.PID == 0) || c.who == "ip" && f.PID == 0 {
				t.Errorf("%s: made by %+v", c.act, f)
			}
		}
	})
}

// While it pauses, the kernel tells nothing of nf_tables.
func TestWatch_pause(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		w := open(t)
		first, second := w.Pause(), w.Pause()
		run(t, "nft", "add", "table", "ip", "fairlead-1")
		second()
		run(t, "nft", "add", "table", "ip", "fairlead-2")
		first()
		run(t, "nft", "add", "table", "ip", "fairlead-3")
		if f := w.next(t); f.What != "added table ip fairlead-3" {
			t.Errorf("%+v", f)
		}
	})
}

// The Watch does not report changes by this process, of whatever thread, nor changes of other programs' own tables.
func TestWatch_ownChanges(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		w := open(t)
		comm, err := os.ReadFile("/proc/self/comm")
		if err != nil {
			t.Fatal(err)
		}
		s, err := nfnetlink.Dial()
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		e := s.Begin()
		start := e.Message(nfnetlink.NFTables, 0x400, 2) // NFT_MSG_NEWTABLE, NLM_F_CREATE, NFPROTO_IPV4
		e.Text(1, "fairlead")
		e.Finish(start)
		if err := s.Commit(); err != nil {
			t.Fatal(err)
		}
		run(t, "nft", "add", "table", "ip", "others")
		run(t, "nft", "delete", "table", "ip", "fairlead")
		if f := w.next(t); f.What != "deleted table ip fairlead" || f.Process == strings.TrimSpace(string(comm)) {
			t.Errorf("%+v", f)
		}
	})
}

// The kernel drops the end of a transaction of ours. The next transaction, of another program, has not done that.
func TestRuleset_cutShort(t *testing.T) {
	w := &Watch{changes: make(chan dataplane.ExternalChange, maxPending), self: self{comm: "fairlead"}}
	hear := w.ruleset()
	tell := func(message uint16, transaction byte, kind uint16, text string) {
		var e nfnetlink.Encoder
		start := e.Message(nfnetlink.NFTables|message, 0, unix.NFPROTO_IPV4)
		e.B[len(e.B)-1] = transaction
		e.Text(kind, text)
		e.Finish(start)
		for m := range nfnetlink.Messages(e.B) {
			hear(m)
		}
	}
	tell(unix.NFT_MSG_NEWTABLE, 1, unix.NFTA_TABLE_NAME, "fairlead")
	tell(unix.NFT_MSG_NEWTABLE, 2, unix.NFTA_TABLE_NAME, "others")
	tell(unix.NFT_MSG_NEWGEN, 2, unix.NFTA_GEN_PROC_NAME, "nft")
	tell(unix.NFT_MSG_DELTABLE, 3, unix.NFTA_TABLE_NAME, "fairlead")
	tell(unix.NFT_MSG_NEWGEN, 3, unix.NFTA_GEN_PROC_NAME, "nft")
	if f := w.next(t); f.What != "deleted table ip fairlead" || len(w.changes) > 0 {
		t.Errorf("%+v, and %d more", f, len(w.changes))
	}
}

// Not only the first socket of this process is known, and of addresses only those of a plane are news.
func TestWatch_ownRouting(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		run(t, "ip", "link", "set", "lo", "up")
		w := open(t)
		run(t, "ip", "link", "add", "other", "type", "veth", "peer", "name", "kube-ipvs0")
		for _, device := range []string{"other", "kube-ipvs0"} {
			run(t, "ip", "link", "set", device, "up")
			run(t, "ip", "address", "add", "fd00:10:96::1/128", "dev", device, "nodad")
		}
		var handles []*netlink.Handle // the first one may have the number of the process
		for range 2 {
			h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
			if err != nil {
				t.Fatal(err)
			}
			defer h.Close()
			handles = append(handles, h)
		}
		for _, h := range handles {
			_, all, _ := net.ParseCIDR("10.96.0.0/16")
			lo, err := h.LinkByName("lo")
			if err != nil {
				t.Fatal(err)
			}
			route := &netlink.Route{
				LinkIndex: lo.Attrs().Index, Dst: all, Protocol: protocol, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL,
				Scope: netlink.SCOPE_HOST,
			}
			if err := h.RouteAdd(route); err != nil {
				t.Fatal(err)
			}
			if err := h.RouteDel(route); err != nil {
				t.Fatal(err)
			}
		}
		run(t, "ip", "address", "del", "fd00:10:96::1/128", "dev", "other")
		run(t, "ip", "address", "del", "fd00:10:96::1/128", "dev", "kube-ipvs0")
		run(t, "ip", "rule", "add", "fwmark", "1", "lookup", "17985", "priority", "99", "protocol", "250")
		run(t, "ip", "rule", "del", "priority", "99")
		for _, want := range []string{"deleted address fd00:10:96::1", "deleted rule 99"} {
			f := w.next(t)
			nobody := f.PID == 0 && strings.HasPrefix(want, "deleted rule") // who deletes such an address the kernel keeps
			if f.What != want || nobody {
				t.Errorf("%+v, want %s", f, want)
			}
		}
	})
}

func TestReplaced(t *testing.T) {
	const line = `audit(1700000000.123:45): table=nat:7 family=10 entries=6 op=xt_replace pid=321 ` +
		`subj=unconfined comm="ip6tables-legac"`
	want := dataplane.ExternalChange{
		What: "replaced table nat of ip6tables", Process: "ip6tables-legac", PID: 321, Only: "ip6tables -t nat",
	}
	if f, ok := replaced(line); !ok || f != want {
		t.Errorf("%+v %v", f, ok)
	}
	for _, other := range []string{
		"", "audit(1:2): table=nat:7 family=2 entries=1 op=nft_register_rule pid=1 comm=\"nft\"",
		"audit(1:2): table=mangle:7 family=2 entries=1 op=xt_replace pid=1 comm=\"x\"",
	} {
		if f, ok := replaced(other); ok {
			t.Errorf("%s: %+v", other, f)
		}
	}
}
