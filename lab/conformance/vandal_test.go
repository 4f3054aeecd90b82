package conformance_test

import (
	"context"
	"strings"
	"testing"

	"fairlead.dev/fairlead/dataplane/iptables"
	"fairlead.dev/fairlead/dataplane/ipvs"
	"fairlead.dev/fairlead/dataplane/userspace"
	"fairlead.dev/fairlead/lab/conformance"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/vm"
)

func TestNFTables_vandalism(t *testing.T) {
	t.Parallel()
	conformance.RunVandalism(t, plane, testbed.Spec{}, nftVandal("fairlead"))
}

func TestUserspace_vandalism(t *testing.T) {
	t.Parallel()
	conformance.RunVandalism(t, userspace.New(userspace.Options{}), testbed.Spec{}, oneOf(
		nftVandal("fairlead"), nftVandal("fairlead"), nftVandal("fairlead"),
		command([]string{"rule 99"}, "ip rule del table 17985", "ip -6 rule del table 17985"),
		command([]string{"table 17985"}, "ip route flush table 17985", "ip -6 route flush table 17985"),
		command([]string{"rule 99"}, "ip rule add priority 99 fwmark 1 lookup 17985", "ip -6 rule add priority 99 lookup 17985"),
	))
}

func TestIPTablesNFT_vandalism(t *testing.T) {
	t.Parallel()
	conformance.RunVandalism(t, iptablesPlane(iptables.NFTables), testbed.Spec{}, iptablesVandal("iptables-nft", "ip6tables-nft"))
}

func TestIPTablesLegacy_vandalism(t *testing.T) {
	t.Parallel()
	conformance.RunVandalism(t, iptablesPlane(iptables.Legacy), testbed.Spec{},
		iptablesVandal("iptables-legacy", "ip6tables-legacy"))
}

func TestIPVS_vandalism(t *testing.T) {
	t.Parallel()
	if !hasIPVS(t) {
		vm.Replay(t, "IPVS")
		return
	}
	for mode, local := range map[ipvs.AddressMode]conformance.Vandal{ipvs.CIDR: routeVandal, ipvs.Dummy: dummyVandal} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			conformance.RunVandalism(t, ipvsPlane(ipvs.Options{AddressMode: mode}), testbed.Spec{}, oneOf(
				nftVandal("fairlead"), ipvsVandal, ipvsVandal, ipvsVandal, local))
		})
	}
}

// oneOf are several vandals.
func oneOf(vandals ...conformance.Vandal) conformance.Vandal {
	return func(ctx context.Context, s *conformance.Site) (conformance.Deed, error) {
		return vandals[s.IntN(len(vandals))](ctx, s)
	}
}

// command runs one of some commands.
func command(names []string, commands ...string) conformance.Vandal {
	return func(ctx context.Context, s *conformance.Site) (conformance.Deed, error) {
		return do(ctx, s, commands[s.IntN(len(commands))], names...)
	}
}

// do does nothing if the command fails.
func do(ctx context.Context, s *conformance.Site, command string, names ...string) (conformance.Deed, error) {
	if _, err := s.Run(ctx, strings.Fields(command)...); err != nil {
		return conformance.Deed{}, nil
	}
	return conformance.Deed{What: command, Names: names}, nil
}

// iptablesVandal breaks tables of iptables.
func iptablesVandal(tools ...string) conformance.Vandal {
	return func(ctx context.Context, s *conformance.Site) (d conformance.Deed, err error) {
		tool := tools[s.IntN(len(tools))] + " -w -t " + []string{"nat", "filter"}[s.IntN(2)] + " "
		text, err := s.Run(ctx, strings.Fields(tool+"-S")...)
		if err != nil {
			return d, err
		}
		var chains []string
		rules := map[string]int{}
		for line := range strings.Lines(text) {
			words := strings.Fields(line)
			if words[0] == "-N" && strings.HasPrefix(words[1], "KUBE-") {
				chains = append(chains, words[1])
			}
			if words[0] == "-A" {
				rules[words[1]]++
			}
		}
		if len(chains) == 0 {
			return d, nil
		}
		chain := chains[s.IntN(len(chains))]
		first := chain + " 1"
		switch s.IntN(8) {
		case 0:
			if rules[chain] == 0 { // which would not be missed
				return d, nil
			}
			return do(ctx, s, tool+"-F", chain)
		case 1:
			return do(ctx, s, tool+"-I "+chain+" -m comment --comment vandal -j RETURN", chain)
		case 2:
			return do(ctx, s, tool+"-A "+chain+" -j ACCEPT", chain)
		}
		if rules[chain] == 0 {
			return d, nil
		}
		switch s.IntN(4) {
		case 0:
			return do(ctx, s, tool+"-F "+chain, chain)
		case 1:
			return do(ctx, s, tool+"-R "+first+" -m comment --comment vandal -j RETURN", chain)
		case 2:
			base := []string{"PREROUTING", "OUTPUT", "POSTROUTING", "FORWARD", "INPUT"}[s.IntN(5)]
			if rules[base] == 0 {
				return d, nil
			}
			return do(ctx, s, tool+"-F "+base, "chain "+base)
		}
		return do(ctx, s, tool+"-D "+first, chain)
	}
}

// ipvsVandal breaks virtual servers.
func ipvsVandal(ctx context.Context, s *conformance.Site) (d conformance.Deed, err error) {
	text, err := s.Run(ctx, "ipvsadm", "-Sn")
	if err != nil {
		return d, err
	}
	lines := strings.Split(strings.TrimSpace(text), "\n")
	words := strings.Fields(lines[s.IntN(len(lines))])
	if len(words) < 5 {
		return d, nil
	}
	server := words[1] + " " + words[2]
	names := []string{"virtual server"}
	if words[1] != "-f" {
		names = []string{"virtual server " + words[2]}
	}
	if words[0] == "-A" {
		if words[1] == "-f" && strings.Contains(strings.Join(words, " "), "-6") {
			server += " -6"
		}
		switch s.IntN(4) {
		case 0:
			return do(ctx, s, "ipvsadm -C", names...)
		case 1:
			return do(ctx, s, "ipvsadm -E "+server+" -s sed", names...)
		case 2:
			return do(ctx, s, "ipvsadm -E "+server+" -s rr -p 30", names...)
		}
		return do(ctx, s, "ipvsadm -D "+server, names...)
	}
	real := words[4]
	switch s.IntN(3) {
	case 0:
		return do(ctx, s, "ipvsadm -d "+server+" -r "+real, real)
	case 1:
		return do(ctx, s, "ipvsadm -e "+server+" -r "+real+" -m -w 77", real)
	}
	foreign := "10.244.9.9:999"
	if strings.HasPrefix(real, "[") {
		foreign = "[fd00::99]:999"
	}
	return do(ctx, s, "ipvsadm -a "+server+" -r "+foreign+" -m -w 3", foreign)
}

// dummyVandal breaks the interface of address mode dummy.
func dummyVandal(ctx context.Context, s *conformance.Site) (d conformance.Deed, err error) {
	const device = "kube-ipvs0"
	text, err := s.Run(ctx, "ip", "-o", "address", "show", "dev", device, "scope", "global")
	if err != nil || strings.TrimSpace(text) == "" {
		return d, err
	}
	lines := strings.Split(strings.TrimSpace(text), "\n")
	address := strings.Fields(lines[s.IntN(len(lines))])[3]
	if s.IntN(2) == 0 {
		return do(ctx, s, "ip link del "+device, address)
	}
	return do(ctx, s, "ip address del "+address+" dev "+device, address)
}

// routeVandal breaks local routes.
func routeVandal(ctx context.Context, s *conformance.Site) (d conformance.Deed, err error) {
	tool := []string{"ip", "ip -6"}[s.IntN(2)]
	text, err := s.Run(ctx, strings.Fields(tool+" route show table local proto 250")...)
	if err != nil || strings.TrimSpace(text) == "" {
		return d, err
	}
	lines := strings.Split(strings.TrimSpace(text), "\n")
	to := strings.Fields(lines[s.IntN(len(lines))])[1]
	if s.IntN(2) == 0 && tool == "ip" {
		return do(ctx, s, "ip route change local "+to+" dev lo table local proto 250 src 127.0.0.1", to)
	}
	return do(ctx, s, tool+" route del local "+to+" table local", to)
}
