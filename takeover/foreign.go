package takeover

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/xt"
)

// foreigner finds rules of other programs that match what kube-proxy's mode ipvs has.
type foreigner struct {
	sets  map[uint16]string // its ip sets, by the numbers that rules have
	found []string
}

// where is a chain with rules.
type where struct{ backend, table, chain string }

// Foreign tells such rules: "nftables ip filter INPUT: kube-ipvs0". They match its interface or an ip set, or
// whether IPVS handles a packet (-m ipvs). A set of nf_tables that has the interface's name is not looked into.
func (t *Takeover) Foreign(context.Context) ([]string, error) {
	f := foreigner{sets: map[uint16]string{}}
	err := t.here.Do(func() error {
		errs := []error{f.readSets()}
		for _, of := range families {
			l := &legacy{family: of, tables: []string{"raw", "mangle", "nat", "filter", "security"}}
			errs = append(errs, l.each(func(s xt.Socket, table string) error { return f.legacy(l, s, table) }))
		}
		for _, of := range slices.Concat(families, []family{{name: "inet", number: unix.NFPROTO_INET}}) {
			errs = append(errs, f.nft(&nfTables{family: of}))
		}
		return errors.Join(errs...)
	})
	return f.found, err
}

func (f *foreigner) readSets() error {
	s, err := xt.Open(false)
	if err != nil {
		return fmt.Errorf("ip sets: %w", err)
	}
	defer func() { _ = s.Close() }()
	for _, of := range families {
		names, err := existingSets(of)
		if err != nil {
			return err
		}
		for _, name := range names {
			number, err := s.SetIndex(name)
			if err != nil {
				return fmt.Errorf("ipset %s: %w", name, err)
			}
			f.sets[number] = name
		}
	}
	return nil
}

func (f *foreigner) legacy(l *legacy, s xt.Socket, table string) error {
	t, err := s.Read(table, nil)
	if err != nil {
		return err
	}
	for _, c := range t.Chains {
		for e := range t.Entries(c) {
			at := where{l.String(), table, c.Name}
			t.Looks(e.Bytes, func(match string, data []byte) { f.look(at, match, data) })
		}
	}
	return nil
}

func (f *foreigner) nft(n *nfTables) error {
	if err := n.open(); err != nil {
		return err
	}
	defer n.close()
	before := len(f.found)
	err := n.conn.Dump(n.asking(unix.NFT_MSG_GETRULE, func() { f.found = f.found[:before] }, func(attrs []byte) {
		at := where{
			"nftables " + n.family.name,
			nfnetlink.Text(attrs, unix.NFTA_RULE_TABLE), nfnetlink.Text(attrs, unix.NFTA_RULE_CHAIN),
		}
		nfnetlink.Attributes(nfnetlink.Attribute(attrs, unix.NFTA_RULE_EXPRESSIONS), func(_ uint16, e []byte) {
			data := nfnetlink.Attribute(e, unix.NFTA_EXPR_DATA)
			switch nfnetlink.Text(e, unix.NFTA_EXPR_NAME) {
			case "cmp":
				f.look(at, "", data)
			case "match": // of iptables-nft
				f.look(at, nfnetlink.Text(data, unix.NFTA_MATCH_NAME), nfnetlink.Attribute(data, unix.NFTA_MATCH_INFO))
			}
		})
	}))
	if errors.Is(err, unix.EINVAL) { // a kernel without nf_tables
		return nil
	}
	if err != nil {
		return fmt.Errorf("nftables: list rules of family %s: %w", n.family.name, err)
	}
	return nil
}

// look notes a rule if what it compares packets with is mode ipvs's: a match or, without a name, data such as
// interfaces.
func (f *foreigner) look(at where, match string, data []byte) {
	what := ""
	switch {
	case match == "" && bytes.Contains(data, []byte(dummyLink)):
		what = dummyLink
	case match == "ipvs":
		what = "-m ipvs"
	case match == "set" && len(data) >= 2:
		what = f.sets[binary.NativeEndian.Uint16(data)]
	}
	rule := fmt.Sprintf("%s %s %s: %s", at.backend, at.table, at.chain, what)
	if what != "" && !ownedChain(at.table, at.chain) && at.table != nftablesTable && !slices.Contains(f.found, rule) {
		f.found = append(f.found, rule)
	}
}
