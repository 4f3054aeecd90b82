package nftables

import (
	"context"
	"errors"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/lab/allocs"
	"fairlead.dev/fairlead/lab/nfnetlinktest"
	"fairlead.dev/fairlead/model"
)

const fuzzedRows = `
frontend 10.96.0.10:80/tcp any forward default/web:http cluster snat offcluster allow 10.0.0.0/8
frontend 10.96.0.11:53/udp internal forward default/dns:dns cluster snat always
frontend 10.96.0.12:80/tcp any reject default/none:http
frontend [fd00::10]:80/tcp any forward default/web:http cluster6 snat never
pool default/web:http cluster
backend default/web:http cluster 10.244.1.2:8080 local
backend default/web:http cluster 10.244.2.2:8080 weight 3
pool default/dns:dns cluster affinity 3h0m0s
backend default/dns:dns cluster 10.244.1.3:53
pool default/web:http cluster6
backend default/web:http cluster6 [fd00::af4:102]:8080 local
guard 10.96.0.0/16 drop
pods 10.244.0.0/16
`

// FuzzTables lists arbitrary messages to the plane. There is no panic, memory is bounded, and the plane finds steps
// that lead from there to the rows. It takes over what it has written itself.
func FuzzTables(f *testing.F) {
	s, err := model.ParseState(fuzzedRows)
	if err != nil {
		f.Fatal(err)
	}
	written := steps(f, s, nil)
	if again := steps(f, s, written); len(again) > len(written)/2 {
		f.Errorf("the plane makes its tables anew: %q", again)
	}
	f.Add(written)
	f.Add(steps(f, model.NewState(), written))
	f.Add(append(written, sparse(f)...))
	f.Fuzz(func(t *testing.T, messages []byte) {
		allocs.Bound(t, len(messages), func() { steps(t, s, messages) })
	})
}

// sparse are slots of a few pools that have no others before them.
func sparse(t testing.TB) []byte {
	k := nfnetlinktest.New(t, nil)
	tx := &nft.Transaction{}
	of := newTable(nft.Families[0], dataplane.DefaultMark, tx)
	for number := range uint32(8) {
		backend := nft.EncodeBackend(netip.MustParseAddrPort("10.244.1.2:80"))
		of.Element(unix.NFT_MSG_NEWSETELEM, slots+of.shardOf(number), slotKey(number, maxIndex), backend)
	}
	if err := tx.Send(k.Socket, tx.Steps); err != nil {
		t.Fatal(err)
	}
	return k.Sent()
}

// steps are the messages by which the plane makes the rows of what the kernel lists.
func steps(t testing.TB, s *model.State, messages []byte) []byte {
	k := nfnetlinktest.New(t, messages)
	p := &Plane{ruleset: nft.Over(k.Socket, (&dataplane.Config{}).Inject), config: dataplane.Config{Mark: dataplane.DefaultMark}}
	tx := &nft.Transaction{}
	tables, err := p.plan(s, planned{tx: tx}, nil)
	if errors.Is(err, nfnetlink.ErrInterrupted) { // an element is listed twice
		return nil
	}
	if !dataplane.Known(err) {
		t.Fatal(err)
	}
	_ = tx.Drifts(s)
	for _, err := range p.Sessions(context.Background(), s) { // of which there may be any
		if err != nil && !errors.Is(err, nfnetlink.ErrInterrupted) {
			t.Error(err)
		}
	}
	for _, t := range tables {
		t.Tx = &nft.Transaction{}
	}
	if err := p.ruleset.Commit(tx); err != nil {
		t.Fatal(err)
	}
	return k.Sent()
}
