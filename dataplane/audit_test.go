package dataplane

import "testing"

func TestCandidates(t *testing.T) {
	all := []ExternalChange{
		{What: "deleted table ip fairlead", Process: "nft"},
		{What: "replaced table nat of iptables", Process: "iptables", Only: "iptables -t nat"},
		{What: "replaced table nat of ip6tables", Process: "ip6tables", Only: "ip6tables -t nat"},
	}
	for object, want := range map[string]string{
		"frontend 10.96.0.1:80/tcp any":        "nft",
		"iptables -t nat: chain KUBE-SERVICES": "nft, iptables",
	} {
		if by := Authors(Candidates(all, []Drift{{Object: object}})); by != want {
			t.Errorf("%s: %s, want %s", object, by, want)
		}
	}
	if some := Candidates(all, nil); some != nil {
		t.Errorf("nothing has changed, and candidates are %v", some)
	}
}
