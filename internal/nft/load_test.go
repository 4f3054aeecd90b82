package nft

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/lab/testbed/nstest"
)

// TestList_growing lists sets right after many elements came, while the kernel moves them to a larger hash table.
func TestList_growing(t *testing.T) {
	const elements, rounds = 9000, 40
	sets := []*Set{
		{Name: "timed", Flags: unix.NFT_SET_TIMEOUT, Key: []Field{Index}},
		{Name: "plain", Key: []Field{Index}},
	}
	nstest.Run(t, func(t *testing.T) {
		c, err := nfnetlink.Dial()
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = c.Close() }()
		for range rounds {
			table := &Table{Family: Families[0], Name: "growing", Sets: sets, FoundSets: map[string]bool{}}
			perform(t, c, table, func() error { return table.Structure(nil) })
			for set, s := range sets {
				perform(t, c, table, func() error {
					for i := range uint32(elements) {
						if set == 0 {
							table.Timed(table.Sets[set], Native(i), nil, Life{Lasts: time.Hour, Left: time.Hour})
						} else {
							table.Element(unix.NFT_MSG_NEWSETELEM, set, Native(i), nil)
						}
					}
					return nil
				})
				listed := map[string]bool{}
				if err := table.List(c, set, func() { clear(listed) }, func(e Element) { listed[string(e.Key)] = true }); err != nil {
					t.Error(err)
				}
				if len(listed) != elements {
					t.Errorf("set %s has %d elements; %d are listed", s.Name, elements, len(listed))
				}
			}
			perform(t, c, table, func() error { table.Delete(); return nil })
		}
	})
}

// perform sends what f appends to the table's transaction.
func perform(t *testing.T, c *nfnetlink.Socket, table *Table, f func() error) {
	t.Helper()
	table.Tx = &Transaction{}
	if err := f(); err != nil {
		t.Error(err)
	}
	for steps := range table.Tx.Chunks(c, chunkSize) {
		if err := table.Tx.Send(c, steps); err != nil {
			t.Error(err)
		}
	}
}
