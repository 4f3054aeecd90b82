package ipvs

import (
	"errors"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/ipvs"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/lab/allocs"
	"fairlead.dev/fairlead/lab/nfnetlinktest"
	"fairlead.dev/fairlead/model"
)

// FuzzTables lists arbitrary messages to the plane as its tables of nf_tables: no panic, and bounded memory.
func FuzzTables(f *testing.F) {
	s, err := model.ParseState(`
frontend 10.96.0.10:80/tcp any forward default/web:http cluster snat offcluster allow 10.0.0.0/8
frontend 10.96.0.12:80/tcp any reject default/none:http
frontend [fd00::10]:80/tcp internal forward default/web:http cluster6 snat never
pool default/web:http cluster affinity 3h0m0s
backend default/web:http cluster 10.244.1.2:8080 local
pool default/web:http cluster6
backend default/web:http cluster6 [fd00::af4:102]:8080
guard 10.96.0.0/16 drop
pods 10.244.0.0/16
`)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(written(f, s))
	f.Fuzz(func(t *testing.T, messages []byte) {
		allocs.Bound(t, len(messages), func() {
			p := &Plane{ruleset: nft.Over(nfnetlinktest.New(t, messages).Socket, (&dataplane.Config{}).Inject), config: dataplane.Config{Mark: dataplane.DefaultMark}}
			k, err := p.recognise(s)
			if errors.Is(err, nfnetlink.ErrInterrupted) { // an element is listed twice
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			for _, table := range k.tables {
				if err := table.loadRecords(p.ruleset.Socket); err != nil && !errors.Is(err, nfnetlink.ErrInterrupted) {
					t.Error(err)
				}
				err := p.eachSession(table, k.affinityPools(), func(dataplane.Session) {})
				if err != nil && !errors.Is(err, nfnetlink.ErrInterrupted) {
					t.Error(err)
				}
			}
		})
	})
}

// written are the messages by which the plane makes its tables.
func written(t testing.TB, s *model.State) []byte {
	kernel := nfnetlinktest.New(t, nil)
	p := &Plane{ruleset: nft.Over(kernel.Socket, (&dataplane.Config{}).Inject), config: dataplane.Config{Mark: dataplane.DefaultMark}}
	p.client, p.locals = &client{Client: &ipvs.Client{}, lacking: &lacking{}}, &locals{}
	todo, err := p.planAll(p.newKernel(), s)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(p.ruleset.Commit(&todo.records), p.ruleset.Commit(&todo.table)); err != nil {
		t.Fatal(err)
	}
	return kernel.Sent()
}
