package ipvs

import (
	"strings"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// originalKey loads the key of the frontends for the destination that the connection's first packet had when it came.
func originalKey(f nft.Family) []any {
	n := f.Address.Words()
	return []any{
		nft.Tuple{Key: f.CtDestination, Register: nft.Word(0)}, nft.LoadMeta(expr.MetaKeyL4PROTO, n),
		nft.Tuple{Key: expr.CtKeyPROTODST, Register: nft.Word(n + 1)},
	}
}

// The sets and maps of a table, by their numbers, after those that all planes have.
const (
	frontends = nft.NumCommon + iota
	internalFrontends
	classes
	recallers
	learners
	affinityFrontends
	hairpin
	localAddresses
	virtualServers
	healthChecks
)

func sets(f nft.Family) []*nft.Set {
	token, address := []nft.Field{nft.Priority}, []nft.Field{f.Address}
	return append(f.CommonSets(),
		&nft.Set{Name: "frontends", Flags: unix.NFT_SET_MAP, Key: f.FrontendKey(), Data: token},
		&nft.Set{Name: "internal-frontends", Flags: unix.NFT_SET_MAP, Key: f.FrontendKey(), Data: token},
		&nft.Set{Name: "classes", Flags: unix.NFT_SET_MAP, Key: token},
		&nft.Set{Name: "recallers", Flags: unix.NFT_SET_MAP, Key: token, Jump: true},
		&nft.Set{Name: "learners", Flags: unix.NFT_SET_MAP, Key: token},
		&nft.Set{Name: "sticky", Key: f.FrontendKey(), Shared: true}, // by frontends of both scopes
		f.Hairpins(),
		&nft.Set{Name: "local-addresses", Key: address},
		&nft.Set{Name: "virtual-servers", Key: f.FrontendKey()},
		&nft.Set{Name: "health-checks", Key: f.FrontendKey()},
	)
}

// The upper bits of the marks by which packets find the virtual server of a pool; the lower ones are its number.
const (
	markBits = 0xfa1 * (nft.PoolMask + 1)
	markMask = 0xffffffff &^ nft.PoolMask

	// masqueradeFlag is set beside these bits in the priority of what IPVS sends and is to be masqueraded. Number 0 is
	// no pool's.
	masqueradeFlag = 2 * (nft.PoolMask + 1)
)

// A class is a way of treating packets that many frontends share; each has one chain. There are 32 of them at most: for
// how long clients are remembered is said by chains of the pool.
type class struct {
	verdict  model.Verdict
	snat     model.SNAT
	affinity bool
	limited  bool        // to the sources in the sources set …
	scope    model.Scope // … of this scope, whose virtual server a forwarded packet goes to
}

// refuses reports whether it lets no client pass.
func (c class) refuses() bool { return c.verdict != model.Forward }

// chain is the name of the class's chain; it says all of the class.
func (c class) chain() string {
	words := []string{c.verdict.String(), c.scope.String()}
	if c.verdict == model.Forward {
		words = append(words, "snat", c.snat.String())
	}
	if c.affinity {
		words = append(words, "affinity")
	}
	if c.limited {
		words = append(words, "sources")
	}
	return strings.Join(words, "-")
}

// hasMarkBits matches packets of which that word has the bits that tell our marks from those of others.
func hasMarkBits(k expr.MetaKey) []any {
	return []any{nft.LoadMeta(k, 0), nft.Bits(0, markMask&^masqueradeFlag, 0), nft.Equals(nft.Native(markBits))}
}

// hasPool matches packets whose priority has the number of a pool.
func hasPool() []any {
	return append(hasMarkBits(expr.MetaKeyPRIORITY),
		nft.LoadMeta(expr.MetaKeyPRIORITY, 0), nft.Bits(0, nft.PoolMask, 0), nft.Differs(nft.Native(0)))
}

// is matches packets by the state of their connection.
func is(state uint32) []any {
	return []any{&expr.Ct{Key: expr.CtKeySTATE, Register: nft.Word(0)}, nft.Bits(0, state, 0), nft.Differs(nft.Native(0))}
}
