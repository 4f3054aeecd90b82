package sidebyside

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"time"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/testbed"
)

// health compares what load balancers are told at the healthCheckNodePorts of all Services. kube-proxy
// programs the kernel first, so its answers may lag behind.
func (p *pair) health(ctx context.Context, o objects) error {
	for name, s := range o.services {
		if s.Spec.HealthCheckNodePort == 0 {
			continue
		}
		for _, a := range both(nodeAddrs[0]) {
			to := netip.AddrPortFrom(a, uint16(s.Spec.HealthCheckNodePort))
			var theirs, ours string
			for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
				theirs, ours = healthAt(ctx, p.theirs.bed, to), healthAt(ctx, p.ours.bed, to)
				if theirs == ours {
					break
				}
			}
			if theirs != ours {
				return fmt.Errorf("health check of %s at %s in mode %s\n\tkube-proxy: %s\n\tfairlead:   %s\n%s",
					name, to, p.mode, theirs, ours, o.only(name))
			}
		}
	}
	return nil
}

// healthAt is the answer's status and what programs read of it, or that there is none.
func healthAt(ctx context.Context, bed *testbed.Bed, to netip.AddrPort) string {
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return bed.Dial(ctx, testbed.Outside, model.TCP, to)
		},
	}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+to.String()+"/", nil)
	if err != nil {
		return err.Error()
	}
	response, err := client.Do(request)
	if err != nil {
		return "nobody answers"
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return err.Error()
	}
	var told any
	if err := json.Unmarshal(body, &told); err != nil {
		return fmt.Sprintf("%d %s", response.StatusCode, body)
	}
	return fmt.Sprintf("%d %v, weight %s, %s", response.StatusCode, told,
		response.Header.Get("X-Load-Balancing-Endpoint-Weight"), response.Header.Get("Content-Type"))
}
