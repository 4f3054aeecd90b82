package conformance_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"

	"fairlead.dev/fairlead/lab/conformance"
)

// nftObject is a line of "nft -j list ruleset".
type nftObject struct {
	Kind                       string // table, chain, rule, set, map
	Family, Table, Name, Chain string
	Handle                     int
	Elements                   []json.RawMessage `json:"elem"`

	rules int // of a chain
}

// where is the object as commands name it.
func (o nftObject) where() []string { return []string{o.Family, o.Table, o.Name} }

// nftObjects are those of tables whose names begin with a prefix.
func nftObjects(ctx context.Context, s *conformance.Site, prefix string) ([]nftObject, error) {
	text, err := s.Run(ctx, "nft", "-j", "list", "ruleset")
	if err != nil {
		return nil, err
	}
	var all struct{ Nftables []map[string]json.RawMessage }
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		return nil, err
	}
	var objects []nftObject
	for _, line := range all.Nftables {
		for kind, body := range line {
			o := nftObject{Kind: kind}
			if kind == "metainfo" || json.Unmarshal(body, &o) != nil {
				continue
			}
			if kind == "table" {
				o.Table = o.Name
			}
			if strings.HasPrefix(o.Table, prefix) {
				objects = append(objects, o)
			}
		}
	}
	for i, chain := range objects {
		for _, rule := range objects {
			if chain.Kind == "chain" && rule.Kind == "rule" && rule.Family == chain.Family && rule.Table == chain.Table &&
				rule.Chain == chain.Name {
				objects[i].rules++
			}
		}
	}
	return objects, nil
}

// nftElement is an element in the words of nft, and the addresses in it.
type nftElement struct{ key, value string }

func parseElement(raw json.RawMessage) (e nftElement) {
	var pair []json.RawMessage
	if json.Unmarshal(raw, &pair) == nil && len(pair) == 2 {
		return nftElement{nftValue(pair[0]), nftValue(pair[1])}
	}
	return nftElement{key: nftValue(raw)}
}

// nftValue is empty for what the vandal has no words for.
func nftValue(raw json.RawMessage) string {
	var text string
	var number json.Number
	var object map[string]json.RawMessage
	switch {
	case json.Unmarshal(raw, &text) == nil:
		return text
	case json.Unmarshal(raw, &number) == nil:
		return number.String()
	case json.Unmarshal(raw, &object) != nil:
		return ""
	}
	var parts []json.RawMessage
	if json.Unmarshal(object["concat"], &parts) == nil && parts != nil {
		var words []string
		for _, p := range parts {
			words = append(words, nftValue(p))
		}
		return strings.Join(words, " . ")
	}
	if json.Unmarshal(object["range"], &parts) == nil && len(parts) == 2 {
		return nftValue(parts[0]) + "-" + nftValue(parts[1])
	}
	var prefix struct {
		Addr string
		Len  int
	}
	if json.Unmarshal(object["prefix"], &prefix) == nil && prefix.Addr != "" {
		return fmt.Sprintf("%s/%d", prefix.Addr, prefix.Len)
	}
	return ""
}

// names are the addresses in an element.
func (e nftElement) names() (names []string) {
	for _, word := range strings.FieldsFunc(e.key+" "+e.value, func(r rune) bool { return r == ' ' || r == '/' || r == '-' }) {
		if a, err := netip.ParseAddr(word); err == nil {
			names = append(names, a.String())
		}
	}
	return names
}

// nftVandal breaks tables of nf_tables.
func nftVandal(prefix string) conformance.Vandal {
	return func(ctx context.Context, s *conformance.Site) (d conformance.Deed, err error) {
		objects, err := nftObjects(ctx, s, prefix)
		if err != nil || len(objects) == 0 {
			return d, err
		}
		o := objects[s.IntN(len(objects))]
		var commands [][]string
		switch o.Kind {
		case "table":
			commands, d.Names = tableDeed(s, o)
		case "chain":
			commands, d.Names = chainDeed(s, o)
		case "rule":
			commands = [][]string{{"delete", "rule", o.Family, o.Table, o.Chain, "handle", fmt.Sprint(o.Handle)}}
			d.Names = []string{"chain " + o.Chain}
		case "set", "map":
			commands, d.Names = setDeed(s, o)
		}
		for _, c := range commands {
			if _, err := s.Run(ctx, append([]string{"nft"}, c...)...); err != nil {
				if d.What == "" {
					return conformance.Deed{}, nil // it is in use, or is gone
				}
				return d, err
			}
			d.What += "nft " + strings.Join(c, " ") + "; "
		}
		return d, nil
	}
}

func tableDeed(s *conformance.Site, o nftObject) (commands [][]string, names []string) {
	switch s.IntN(3) {
	case 0:
		return [][]string{{"flush", "ruleset"}}, []string{"table " + o.Family + " " + o.Table}
	case 1:
		return [][]string{{"delete", "table", o.Family, o.Table}}, []string{"table " + o.Family + " " + o.Table}
	}
	return [][]string{{"flush", "table", o.Family, o.Table}}, []string{"chain "}
}

func chainDeed(s *conformance.Site, o nftObject) (commands [][]string, names []string) {
	names = []string{"chain " + o.Name}
	switch s.IntN(5) {
	case 0:
		if o.rules == 0 {
			return nil, nil
		}
		return [][]string{append([]string{"flush", "chain"}, o.where()...)}, names
	case 1:
		return [][]string{append(append([]string{"insert", "rule"}, o.where()...), "counter", "accept")}, names
	case 2:
		return [][]string{append(append([]string{"add", "rule"}, o.where()...), "drop")}, names
	case 3:
		return [][]string{{"add", "chain", o.Family, o.Table, "vandal"}}, []string{"chain vandal"}
	}
	return [][]string{{
		"delete", "chain", o.Family, o.Table, o.Name,
	}}, []string{"chain " + o.Name, "table " + o.Family + " " + o.Table}
}

// setDeed leaves alone what packets themselves put into sets.
func setDeed(s *conformance.Site, o nftObject) (commands [][]string, names []string) {
	if len(o.Elements) == 0 || strings.HasPrefix(o.Name, "affinity") || strings.HasPrefix(o.Name, "clients") {
		return nil, nil
	}
	e := parseElement(o.Elements[s.IntN(len(o.Elements))])
	other := parseElement(o.Elements[s.IntN(len(o.Elements))])
	if e.key == "" {
		return nil, nil
	}
	names = e.names()
	if len(names) == 0 {
		names = []string{o.Name, "pool "}
	}
	gone := append(append([]string{"delete", "element"}, o.where()...), "{ "+e.key+" }")
	switch s.IntN(4) {
	case 0:
		return [][]string{append([]string{"flush", o.Kind}, o.where()...)}, names
	case 1:
		if o.Kind == "map" && e.value != "" && other.value != "" && other.value != e.value {
			again := append(append([]string{"add", "element"}, o.where()...), "{ "+e.key+" : "+other.value+" }")
			return [][]string{gone, again}, names
		}
	case 2:
		if o.Name == "reject-addresses" || o.Name == "drop-addresses" {
			a := map[string]string{"ip": "198.51.100.77", "ip6": "2001:db8::77"}[o.Family]
			return [][]string{append(append([]string{"add", "element"}, o.where()...), "{ "+a+" }")}, []string{a}
		}
	}
	return [][]string{gone}, names
}
