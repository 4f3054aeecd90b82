package daemon

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	kubeproxy "k8s.io/kube-proxy/config/v1alpha1"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/said"
	"fairlead.dev/fairlead/source/kube"
)

// forwardReminder is how long a closed FORWARD goes without being said again. An API server keeps
// Events for an hour.
const forwardReminder = 30 * time.Minute

// acceptsForward reports whether kube-proxy would accept in FORWARD what it translates, and the data
// plane, as in mode nftables, does not.
func acceptsForward(c *config.Config, plane string) bool {
	like := []kubeproxy.ProxyMode{config.ModeNFTables, config.ModeEBPF, config.ModeUserspace, config.ModeAuto}
	return !slices.Contains(like, c.KubeProxy.Mode) && plane != iptablesPlane && !standalone(c)
}

// forwarding is what a successor knows of the chain FORWARD.
type forwarding struct {
	*successor
	blocked said.Condition // packets are dropped that kube-proxy would accept
	failure said.Condition // to find that out
}

// watchForward looks until ctx ends whether packets will be dropped that kube-proxy would accept: a
// firewall may come long after the process, and KUBE-FORWARD may be cut off.
func (s *successor) watchForward(ctx context.Context) {
	for f := (forwarding{successor: s, blocked: said.Condition{Reminder: s.reminder}}); ; {
		f.look(ctx)
		select {
		case <-ctx.Done():
			return
		case <-time.After(s.interval):
		}
	}
}

// look says what begins and what ends, and from time to time what lasts.
func (f *forwarding) look(ctx context.Context) {
	if !f.accepted() {
		f.blocked.Cleared()
		f.closed(false)
		return
	}
	where, err := f.takeover.Blocked(ctx)
	if err != nil {
		if f.failure.Changed(err.Error()) {
			f.log.Warn("cannot check whether chain FORWARD drops packets to pods; trying again", "error", err)
		}
		return
	}
	f.failure.Cleared()
	f.closed(len(where) > 0)
	switch text := strings.Join(where, ", "); {
	case text != "" && f.blocked.Changed(text):
		f.warn(text)
	case text == "" && f.blocked.Cleared():
		f.log.Info("chain FORWARD no longer drops packets that kube-proxy would accept")
		f.report.emit(kube.Event{Reason: reasonUnblocked,
			Message: "chain FORWARD no longer drops packets that kube-proxy would accept"})
	}
}

func (f *forwarding) warn(where string) {
	f.log.Warn("chain FORWARD drops packets of Services that kube-proxy would accept: have the CNI plug-in, or your "+
		"own rules, accept packets from and to pods", "chain", where)
	f.report.warn(reasonBlocked, fmt.Sprintf("chain FORWARD (%s) drops packets of Services, which kube-proxy's "+
		"KUBE-FORWARD would accept; have the CNI plug-in, or your own rules, accept packets from and to pods", where))
}
