package external

import (
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
)

// records hears what the kernel writes where it is audited: as a line of text
//
//	audit(1700000000.123:45): table=nat:7 family=2 entries=6 op=xt_replace pid=321 subj=unconfined comm="iptables"
//
// for each table of x_tables that is replaced, in whatever network namespace: that of a pod, mostly. Of nf_tables it is
// told otherwise.
func (w *Watch) records(m syscall.NetlinkMessage) {
	if m.Header.Type != unix.AUDIT_NETFILTER_CFG {
		return
	}
	if f, ok := replaced(unix.ByteSliceToString(m.Data)); ok && !w.isThisProcess(f) {
		w.notify(f)
	}
}

// isThisProcess knows the number of the process, where the kernel tells that of a thread otherwise.
func (w *Watch) isThisProcess(f dataplane.ExternalChange) bool {
	return f.Process == w.self.comm && (!w.self.initial || f.PID == unix.Getpid())
}

// replaced reads such a line.
func replaced(line string) (f dataplane.ExternalChange, ok bool) {
	words := map[string]string{}
	for _, word := range strings.Fields(line) {
		if name, value, ok := strings.Cut(word, "="); ok {
			words[name] = value
		}
	}
	table, _, _ := strings.Cut(words["table"], ":")
	if !strings.HasPrefix(words["op"], "xt_") || table != "nat" && table != "filter" {
		return f, false
	}
	tool := "iptables"
	if words["family"] == strconv.Itoa(unix.AF_INET6) {
		tool = "ip6tables"
	}
	f.What = "replaced table " + table + " of " + tool
	f.Only = tool + " -t " + table        // so are the drifts named that this makes
	f.PID, _ = strconv.Atoi(words["pid"]) // without it no process is named
	f.Process = strings.Trim(words["comm"], `"`)
	return f, true
}
