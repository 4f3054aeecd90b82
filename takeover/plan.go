package takeover

import (
	"fmt"
	"slices"
)

// jump is a rule of iptables that leads to another chain.
type jump struct {
	from     string
	fromBase bool // from a built-in chain
	to       string
	id       int // which rule: the back end's affair
}

// plan says what goes from a table of iptables.
type plan struct {
	jumps  []jump   // from chains that stay to chains that go
	chains []string // in the table's order
	stay   []stay
}

// stay is a chain of kube-proxy to which another program's rule jumps. It cannot be deleted without that rule, and the
// rule is not ours to delete. Or it is KUBE-FORWARD, because of FORWARD.
type stay struct{ chain, because string }

// newPlan divides the chains of a table. The jumps from built-in chains to kube-proxy's entries are kube-proxy's. Any
// other from outside is another program's that uses its chain, as CRI-O and the CNI plug-in portmap can use
// KUBE-MARK-MASQ. KeepForward says that FORWARD must go on asking KUBE-FORWARD.
func newPlan(table string, chains []string, jumps []jump, keepForward bool) plan {
	stays := map[string]string{} // chain to who uses it
	var keep func(chain, user string)
	keep = func(chain, user string) {
		if _, known := stays[chain]; known || !ownedChain(table, chain) {
			return
		}
		stays[chain] = user
		for _, j := range jumps {
			if j.from == chain {
				keep(j.to, chain)
			}
		}
	}
	var p plan
	for _, j := range jumps {
		switch {
		case !ownedChain(table, j.to) || ownedChain(table, j.from):
		case keepForward && j.fromBase && j.to == forwardChain:
			keep(j.to, forwardHook)
		case j.fromBase && slices.Contains(entries, j.to):
			p.jumps = append(p.jumps, j)
		default:
			keep(j.to, j.from)
		}
	}
	for _, c := range chains {
		user, stays := stays[c]
		switch {
		case stays:
			p.stay = append(p.stay, stay{c, user})
		case ownedChain(table, c):
			p.chains = append(p.chains, c)
		}
	}
	// An entry that stays for another's sake keeps all its callers.
	p.jumps = slices.DeleteFunc(p.jumps, func(j jump) bool { _, stays := stays[j.to]; return stays })
	return p
}

func (p plan) empty() bool { return len(p.chains) == 0 && len(p.jumps) == 0 }

// leftovers are the same in words. Tool is the iptables that shows this back end.
func (p plan) leftovers(l Leftover, tool string) []Leftover {
	var found []Leftover
	if len(p.chains) > 0 {
		l.What, l.Count = "chains", len(p.chains)
		found = append(found, l)
	}
	for _, s := range p.stay {
		l.What, l.Count = "chain "+s.chain, 1
		l.Stays = fmt.Sprintf("another program's rule in chain %s jumps to it; if that rule is not needed, delete it "+
			"(see %s -t %s -S %s) and run fairlead clean", s.because, tool, l.Table, s.because)
		if s.because == forwardHook {
			l.Stays = fmt.Sprintf("without it, chain FORWARD would drop packets of Services; have the CNI plug-in, or your "+
				"own rules, accept packets from and to pods, then delete its rule in FORWARD (see %s -S FORWARD)", tool)
		}
		found = append(found, l)
	}
	return found
}
