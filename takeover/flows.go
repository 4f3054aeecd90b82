package takeover

import (
	"bufio"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/tracked"
)

// flow is a connection as its client sees it.
type flow struct {
	protocol         uint8
	client, assigned netip.AddrPort
}

// ipvsFlows are the connections of IPVS.
func ipvsFlows() (map[flow]bool, error) {
	f, err := os.Open("/proc/thread-self/net/ip_vs_conn")
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("ipvs connections: %w", err)
	}
	defer f.Close()
	flows := map[flow]bool{}
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if x, ok := parseFlow(lines.Text()); ok {
			flows[x] = true
		}
	}
	return flows, lines.Err()
}

// parseFlow reads a line like "TCP C0000209 C350 0A60000A 0050 0AF40102 1F90 ESTABLISHED 899".
func parseFlow(line string) (flow, bool) {
	f := strings.Fields(line)
	if len(f) < 5 {
		return flow{}, false
	}
	protocol, known := map[string]uint8{
		"TCP": unix.IPPROTO_TCP, "UDP": unix.IPPROTO_UDP, "SCTP": unix.IPPROTO_SCTP}[f[0]]
	client, err1 := parseHexPort(f[1], f[2])
	assigned, err2 := parseHexPort(f[3], f[4])
	return flow{protocol, client, assigned}, known && err1 == nil && err2 == nil
}

func parseHexPort(address, port string) (netip.AddrPort, error) {
	n, err := strconv.ParseUint(port, 16, 16)
	if err != nil {
		return netip.AddrPort{}, err
	}
	if b, err := hex.DecodeString(address); err == nil && len(b) == 4 {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b)), uint16(n)), nil
	}
	a, err := netip.ParseAddr(strings.Trim(address, "[]"))
	return netip.AddrPortFrom(a, uint16(n)), err
}

// forget deletes what conntrack knows of flows. A client that goes on is then translated like a new
// one, or refused by its backend: otherwise its packets would go untranslated to nowhere.
func forget(flows map[flow]bool) error {
	if len(flows) == 0 {
		return nil
	}
	return eachFlow(func(x flow) bool { return flows[x] })
}

// sourcesIn are those of the addresses from which connections come.
func sourcesIn(addrs map[netip.Addr]netlink.Addr) (map[netip.Addr]bool, error) {
	used := map[netip.Addr]bool{}
	err := eachFlow(func(x flow) bool {
		if _, ok := addrs[x.client.Addr()]; ok {
			used[x.client.Addr()] = true
		}
		return false
	})
	return used, err
}

// eachFlow shows f all that conntrack knows, and deletes those for which it is true.
func eachFlow(f func(flow) bool) error {
	conn, err := nfnetlink.Dial()
	if err != nil {
		return fmt.Errorf("conntrack: %w", err)
	}
	defer conn.Close()
	_, err = tracked.ForgetListed(conn, func(x *tracked.Flow) bool {
		return f(flow{uint8(x.Protocol), x.From, x.To})
	}, tracked.Filter{})
	if err != nil {
		return fmt.Errorf("conntrack: %w", err)
	}
	return nil
}
