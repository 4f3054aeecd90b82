package main

import (
	"bytes"
	"compress/flate"
	"context"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/lab/testbed"
)

// facility has kernel objects that can be written as text, and made of it.
type facility struct {
	name string
	save func(machine) string
	load func(m machine, text string)
}

// facilities are in the order in which objects refer to each other.
func facilities() []facility {
	return []facility{
		command("sysctl", "sysctl -a -r '^net.ipv4.("+settings+")$'", "sysctl -p /dev/stdin"),
		command("ipset", "ipset save", "ipset restore"),
		command("legacy", legacy, "iptables-legacy-restore"),
		command("ipvs", "[ ! -e /proc/net/ip_vs ] || ipvsadm-save -n", "ipvsadm-restore"),
		command("routes", routes, "sh"),
		{"nf_tables", machine.saveTables, machine.loadTables},
		{"maps", machine.saveMaps, machine.loadMaps},
	}
}

const (
	// settings are sysctls on which rules rely.
	settings = "conf.all.route_localnet|vs.(conntrack|conn_reuse_mode|expire_nodest_conn)"
	// legacy prints rules of iptables, if some are Fairlead's.
	legacy = "iptables-legacy-save | grep -v ^# | grep -zw KUBE-SERVICES | tr -d '\\0'"
)

// routes prints commands that make the routes and rules of routing.
const routes = `for family in -4 -6; do
	for protocol in 250 251; do ip $family route show table all proto $protocol |
		sed "s/^/ip $family route add /; s/$/ proto $protocol/"; done
	ip $family rule show priority 99 | sed "s/^99:/ip $family rule add priority 99/"
done`

// command is a facility that programs save and load.
func command(name, save, load string) facility {
	return facility{name,
		func(m machine) string { return m.on(testbed.Node, "sh", "-c", save) },
		func(m machine, text string) {
			c := m.bed.Command(context.WithoutCancel(m.Context()), testbed.Node, "sh", "-c", load)
			c.Stdin = strings.NewReader(text)
			if out, err := c.CombinedOutput(); err != nil {
				m.Fatalf("%s: %v: %s", load, err, out)
			}
		}}
}

// pack makes a text short. People cannot read it anyway.
func pack(text string) string {
	if text == "" {
		return ""
	}
	var b bytes.Buffer
	w, _ := flate.NewWriter(&b, flate.BestCompression)
	_, _ = io.WriteString(w, text)
	_ = w.Close() // a buffer takes everything
	return base64.StdEncoding.EncodeToString(b.Bytes()) + "\n"
}

func (m machine) unpack(text string) string {
	m.Helper()
	b, err := io.ReadAll(flate.NewReader(base64.NewDecoder(base64.StdEncoding, strings.NewReader(text))))
	if err != nil {
		m.Fatal(err)
	}
	return string(b)
}

// kind is a kind of objects of nf_tables. The listing of an object makes it again, but for some attributes. The text of
// nft lacks what Fairlead keeps in the user data.
type kind struct {
	name   string
	make   uint16   // the message that makes one; the next number lists them
	handle uint16   // the attribute that tells an object from one of the same name; 0: there is none
	drop   []uint16 // attributes that are listed and cannot be set
}

func kinds() []kind {
	const tableHandle, setHandle, setType, setCount = 4, 16, 19, 20
	return []kind{
		{"table", unix.NFT_MSG_NEWTABLE, tableHandle, []uint16{unix.NFTA_TABLE_USE}},
		{"chain", unix.NFT_MSG_NEWCHAIN, unix.NFTA_CHAIN_HANDLE, []uint16{unix.NFTA_CHAIN_USE}},
		{"set", unix.NFT_MSG_NEWSET, setHandle, []uint16{setType, setCount}},
		{"element", unix.NFT_MSG_NEWSETELEM, 0, nil},
		{"rule", unix.NFT_MSG_NEWRULE, unix.NFTA_RULE_HANDLE, []uint16{unix.NFTA_RULE_POSITION}},
	}
}

// netfilter calls f with a socket of the node.
func (m machine) netfilter(f func(*nfnetlink.Socket) error) {
	m.Helper()
	err := m.bed.Do(testbed.Node, func() error {
		s, err := nfnetlink.Dial()
		if err != nil {
			return err
		}
		return errors.Join(f(s), s.Close())
	})
	if err != nil {
		m.Fatal(err)
	}
}

// eachObject calls f with all objects of nf_tables, kind by kind.
func (m machine) eachObject(f func(k kind, family uint8, attrs []byte)) {
	m.Helper()
	m.netfilter(func(s *nfnetlink.Socket) (err error) {
		elements := map[uint8][]nfnetlink.Encoder{} // by family: filters for those of each set
		for _, k := range kinds() {
			for _, family := range []uint8{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} {
				filters := []nfnetlink.Encoder{{}}
				if k.make == unix.NFT_MSG_NEWSETELEM {
					filters = elements[family]
				}
				for _, filter := range filters {
					err = errors.Join(err, s.Dump(nfnetlink.Request{
						Kind: nfnetlink.NFTables | (k.make + 1), Family: family, Filter: filter, Reset: func() {},
						Each: func(attrs []byte) {
							if k.make == unix.NFT_MSG_NEWSET {
								elements[family] = append(elements[family], elementsOf(attrs))
							}
							f(k, family, attrs)
						},
					}))
				}
			}
		}
		return err
	})
}

// elementsOf asks for those of a set that is listed.
func elementsOf(set []byte) (filter nfnetlink.Encoder) {
	filter.Text(unix.NFTA_SET_ELEM_LIST_TABLE, nfnetlink.Text(set, unix.NFTA_SET_TABLE))
	filter.Text(unix.NFTA_SET_ELEM_LIST_SET, nfnetlink.Text(set, unix.NFTA_SET_NAME))
	return filter
}

func (m machine) saveTables() string {
	m.Helper()
	var text strings.Builder
	m.eachObject(func(k kind, family uint8, attrs []byte) {
		var e nfnetlink.Encoder
		nfnetlink.Attributes(attrs, func(a uint16, data []byte) {
			if a != k.handle && !slices.Contains(k.drop, a) {
				e.Bytes(a, data)
			}
		})
		fmt.Fprintf(&text, "%d %d %x\n", family, k.make, e.B)
	})
	return pack(text.String())
}

func (m machine) loadTables(text string) {
	m.Helper()
	m.netfilter(func(s *nfnetlink.Socket) error {
		b, number := s.Begin(), uint32(0)
		for line := range strings.Lines(m.unpack(text)) {
			var family uint8
			var makes uint16
			var attrs []byte
			if _, err := fmt.Sscanf(line, "%d %d %x", &family, &makes, &attrs); err != nil {
				return err
			}
			at := b.Message(nfnetlink.NFTables|makes, unix.NLM_F_CREATE|unix.NLM_F_APPEND, family)
			b.B = append(b.B, attrs...)
			switch makes {
			case unix.NFT_MSG_NEWSET:
				number++
				b.Uint32(unix.NFTA_SET_ID, number)
			case unix.NFT_MSG_NEWRULE:
				addProtocol(b, nfnetlink.Attribute(attrs, unix.NFTA_RULE_EXPRESSIONS))
			}
			b.Finish(at)
		}
		return s.Commit()
	})
}

// addProtocol says for which protocol a rule is, as extensions of iptables want it. The kernel does not list that.
func addProtocol(b *nfnetlink.Encoder, expressions []byte) {
	const protocol, flags = 1, 2 // NFTA_RULE_COMPAT_*
	loaded := false
	nfnetlink.Attributes(expressions, func(_ uint16, e []byte) {
		data := nfnetlink.Attribute(e, unix.NFTA_EXPR_DATA)
		value := nfnetlink.Attribute(nfnetlink.Attribute(data, unix.NFTA_CMP_DATA), unix.NFTA_DATA_VALUE)
		if loaded && len(value) == 1 {
			c := b.Open(unix.NFTA_RULE_COMPAT)
			b.Uint32(protocol, uint32(value[0]))
			b.Uint32(flags, 0)
			b.Close(c)
		}
		loaded = nfnetlink.Text(e, unix.NFTA_EXPR_NAME) == "meta" &&
			nfnetlink.Uint32(data, unix.NFTA_META_KEY) == unix.NFT_META_L4PROTO
	})
}

// objects names each object that is another one when it is made anew.
func (m machine) objects() map[string]bool {
	m.Helper()
	found := map[string]bool{}
	m.eachObject(func(k kind, family uint8, attrs []byte) {
		if k.handle != 0 {
			table := nfnetlink.Text(attrs, unix.NFTA_TABLE_NAME) // its number is the same in all kinds
			found[fmt.Sprintf("%s of table %s (family %d): %d", k.name, table, family, nfnetlink.Uint64(attrs, k.handle))] = true
		}
	})
	m.eachMap(func(name string, table *ebpf.Map) error {
		info, err := table.Info()
		if id, ok := info.ID(); ok && table.Type() != ebpf.LRUHash { // the size of which the machine decides
			found[fmt.Sprintf("map %s: %d", name, id)] = true
		}
		return err
	})
	return found
}

// eachMap calls f with the pinned maps. Those of sockets have nothing that another machine has.
func (m machine) eachMap(f func(name string, table *ebpf.Map) error) {
	m.Helper()
	paths, err := filepath.Glob(filepath.Join(m.pinned, "memory", "*"))
	if err != nil {
		m.Fatal(err)
	}
	for _, path := range paths {
		table, err := ebpf.LoadPinnedMap(path, nil)
		if err == nil && !slices.Contains([]string{"sockets", "claims", "peers", "flows"}, filepath.Base(path)) {
			err = f(filepath.Base(path), table)
		}
		if err = errors.Join(err, table.Close()); err != nil {
			m.Fatalf("%s: %v", path, err)
		}
	}
}

// saveMaps prints the words of elements that are not 0.
func (m machine) saveMaps() string {
	m.Helper()
	const word = 8
	var text strings.Builder
	m.eachMap(func(name string, table *ebpf.Map) error {
		fmt.Fprintln(&text, name, uint32(table.Type()), table.KeySize(), table.ValueSize(), table.MaxEntries(), table.Flags())
		key, value := make([]byte, table.KeySize()), make([]byte, table.ValueSize())
		elements := table.Iterate()
		for elements.Next(&key, &value) {
			if len(bytes.Trim(value, "\x00")) == 0 {
				continue
			}
			fmt.Fprintf(&text, "  %x", key)
			for at := 0; at < len(value); at += word {
				if w := value[at:min(at+word, len(value))]; len(bytes.Trim(w, "\x00")) > 0 {
					fmt.Fprintf(&text, " %d:%x", at, w)
				}
			}
			fmt.Fprintln(&text)
		}
		return elements.Err()
	})
	return text.String()
}

// loadMaps makes and pins the maps. Their elements were used just now.
func (m machine) loadMaps(text string) {
	m.Helper()
	node := ""
	err := m.bed.Do(testbed.Node, func() (err error) {
		node, err = os.Readlink("/proc/thread-self/ns/net")
		return err
	})
	err = errors.Join(err, os.MkdirAll(filepath.Join(m.pinned, "memory"), 0o700),
		os.Symlink(node, filepath.Join(m.pinned, "netns")))
	if err != nil {
		m.Fatal(err)
	}
	var name string
	var table *ebpf.Map
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, " ") {
			err = loadElement(name, table, strings.Fields(line))
		} else {
			var s ebpf.MapSpec
			_, err = fmt.Sscanln(line, &name, (*uint32)(&s.Type), &s.KeySize, &s.ValueSize, &s.MaxEntries, &s.Flags)
			if err == nil {
				table, err = ebpf.NewMap(&s)
			}
			if err == nil {
				m.Cleanup(func() { _ = table.Close() })
				err = table.Pin(filepath.Join(m.pinned, "memory", name))
			}
		}
		if err != nil {
			m.Fatalf("map %s: %v", name, err)
		}
	}
}

func loadElement(name string, table *ebpf.Map, words []string) error {
	key, err := hex.DecodeString(words[0])
	value := make([]byte, table.ValueSize())
	for _, text := range words[1:] {
		var at int
		var word []byte
		_, failed := fmt.Sscanf(text, "%d:%x", &at, &word)
		err = errors.Join(err, failed)
		copy(value[at:], word)
	}
	var now unix.Timespec
	if err = errors.Join(err, unix.ClockGettime(unix.CLOCK_MONOTONIC, &now)); err != nil {
		return err
	}
	switch name { // where its time is
	case "affinities":
		binary.NativeEndian.PutUint64(value[24:], uint64(now.Nano()))
	case "translations":
		binary.NativeEndian.PutUint32(value[40:], uint32(now.Nano()>>20))
	}
	return table.Put(key, value)
}
