package iptables

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/xt"
)

// Detect finds the back end that the machine uses, in the network namespace of the calling thread. It takes the one in
// which kubelet has put its hint (KEP-3178). Else it takes that of the iptables program on the path, or the one that
// there is. The wrapper scripts of kube-proxy's images look at the same.
//
// The hint comes first because kubelet writes it with the iptables of the host. The program on the path may be that of
// this process's image. In the other back end the rules would work, too. But the host's iptables would not show them,
// and each packet would pass both back ends.
func Detect() (Backend, error) {
	n, err := openNFT(nil, false)
	if err == nil {
		hinted, listErr := n.hinted()
		err = errors.Join(listErr, n.close())
		if hinted {
			return NFTables, nil
		}
	}
	switch {
	case legacyHinted():
		return Legacy, nil
	case err != nil: // no nf_tables, or no right to look
		if errors.Is(err, unix.EPERM) {
			return "", err
		}
		return Legacy, nil
	}
	if b := installed(filepath.SplitList(os.Getenv("PATH"))); b != "" {
		return b, nil
	}
	return NFTables, nil
}

// isHint reports whether a chain of table mangle is one that kubelet keeps there.
func isHint(chain string) bool {
	return chain == "KUBE-IPTABLES-HINT" || chain == "KUBE-KUBELET-CANARY"
}

const hintTable = "mangle"

func (n *nfTables) hinted() (found bool, err error) {
	for _, v6 := range []bool{false, true} {
		mangle := tableID{v6, hintTable}.of(nil)
		err := n.Dump(mangle.Listing(unix.NFT_MSG_GETCHAIN, func() {}, func(attrs []byte) {
			found = found || isHint(nfnetlink.Text(attrs, unix.NFTA_CHAIN_NAME))
		}))
		if found || err != nil {
			return found, err
		}
	}
	return false, nil
}

// legacyHinted does not look into unused tables: that would make them.
func legacyHinted() bool {
	l, err := openLegacy(nil, nil)
	if err != nil {
		return false
	}
	defer l.close()
	for _, id := range []tableID{{false, hintTable}, {true, hintTable}} {
		present, _ := l.present(id.v6) // tables that cannot be read give no hint
		if !slices.Contains(present, hintTable) {
			continue
		}
		t, err := l.read(id)
		if err == nil && slices.ContainsFunc(t.Chains, func(c *xt.Chain) bool { return isHint(c.Name) }) {
			return true
		}
	}
	return false
}

// installed is the back end of the first iptables program in some directories; empty if there is none.
func installed(path []string) Backend {
	for _, dir := range path {
		program, err := filepath.EvalSymlinks(filepath.Join(dir, "iptables"))
		if err != nil {
			continue
		}
		switch name := filepath.Base(program); {
		case strings.Contains(name, "legacy"):
			return Legacy
		case strings.Contains(name, "nft"):
			return NFTables
		}
	}
	return ""
}
