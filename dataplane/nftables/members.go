package nftables

import (
	"net/netip"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// members counts who needs each element of a set, by its encoded key. An element that nobody needs
// any more is deleted at once; one that load found has no user until somebody asks for it.
type members map[string]int

// need counts one more user of an element, and adds it if it is the first.
func (t *table) need(s int, key string) {
	n, ok := t.members[s][key]
	t.members[s][key] = n + 1
	if !ok {
		t.Element(unix.NFT_MSG_NEWSETELEM, s, []byte(key), nil)
	}
}

// release counts one user less, and deletes the element if it was the last.
func (t *table) release(s int, key string) {
	if t.members[s][key]--; t.members[s][key] <= 0 {
		t.Element(unix.NFT_MSG_DELSETELEM, s, []byte(key), nil)
		delete(t.members[s], key)
	}
}

// sweepMembers deletes the elements that load found and nobody needs.
func (t *table) sweepMembers() {
	for s := range t.members {
		for key, n := range t.members[s] {
			if n == 0 {
				t.Element(unix.NFT_MSG_DELSETELEM, s, []byte(key), nil)
				delete(t.members[s], key)
			}
		}
	}
}

// sourcesOf are the keys of the elements that allow sources to reach a frontend now.
func (t *table) sourcesOf(key model.Key) []string {
	r := t.rows[key]
	if r.found {
		return t.found.sources[key]
	}
	return nft.EncodeSources(key, r.allow)
}

// replace makes some members of a set take the place of others. What is gone goes first, and in the
// same kernel transaction: a range must not overlap one that is still there.
func (t *table) replace(s int, old, now []string) {
	had, stay := keySet(old), keySet(now)
	for _, key := range old {
		if !stay[key] {
			t.release(s, key)
			t.Tx.Join()
		}
	}
	for _, key := range now {
		if t.members[s][key] == 0 || !had[key] {
			t.need(s, key)
		}
	}
}

func keySet(keys []string) map[string]bool {
	if len(keys) == 0 {
		return nil
	}
	set := make(map[string]bool, len(keys))
	for _, key := range keys {
		set[key] = true
	}
	return set
}

// setSpans makes a set consist of these ranges.
func (t *table) setSpans(s int, now []string) {
	t.replace(s, t.spans[s], now)
	t.spans[s] = now
}

// setAddress makes an address a member of a set or not.
func (t *table) setAddress(s int, a netip.Addr, want bool) {
	key := string(a.AsSlice())
	switch n, ok := t.members[s][key]; {
	case want && n == 0:
		t.need(s, key)
	case !want && ok:
		t.release(s, key)
	}
}
