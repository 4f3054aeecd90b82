package takeover

import (
	"context"
	"errors"
	"fmt"
)

// FORWARD must accept packets of Services if the chain lets nothing else pass. Docker, ufw and hardened machines give
// it the policy DROP, other programs end it with a rule that rejects. In the modes iptables and ipvs, KUBE-FORWARD has
// two such rules: one for packets with kube-proxy's mark, which NodePorts need, and one for established connections.
// Fairlead sets the same mark.
const (
	filterTable  = "filter"
	forwardHook  = "FORWARD"
	forwardChain = "KUBE-FORWARD"
)

// nfDrop is NF_DROP, a verdict of the kernel.
const nfDrop = 0

// kept is what the traces tell each other of chains that are left on purpose.
type kept struct {
	wanted  bool // keep KUBE-FORWARD where it is needed
	forward bool // it stays, in one table at least
}

// note remembers what a plan keeps.
func (k *kept) note(p plan) {
	for _, s := range p.stay {
		k.forward = k.forward || s.chain == forwardChain
	}
}

// keeps reports whether KUBE-FORWARD must stay in a table.
func (k *kept) keeps(table string, f forward) bool {
	return k.wanted && table == filterTable && f.closed
}

// forward is what a chain FORWARD does with packets.
type forward struct {
	closed bool // it lets nothing pass that no rule accepts
	kube   bool // it asks KUBE-FORWARD
}

// Blocked tells where FORWARD lets nothing pass that no rule accepts, and does not ask KUBE-FORWARD:
// as "iptables-nft ip", sorted by family.
func (t *Takeover) Blocked(context.Context) ([]string, error) {
	var blocked []string
	err := t.here.Do(func() error {
		var errs []error
		for _, f := range families {
			nft := &compat{nfTables: nfTables{family: f}}
			for _, x := range []interface{ blocked() (bool, error) }{&legacy{family: f, tables: tables}, nft} {
				yes, err := x.blocked()
				if yes {
					blocked = append(blocked, fmt.Sprintf("%s", x))
				}
				errs = append(errs, err)
			}
		}
		return errors.Join(errs...)
	})
	return blocked, err
}
