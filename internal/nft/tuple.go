package nft

import (
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nfnetlink"
)

// Tuple loads a part of a connection's original tuple, or of the one that answers have. (expr.Ct writes the
// direction in four bytes; the kernel takes the first one, and complains in its log.)
type Tuple struct {
	Key      expr.CtKey
	Register uint32
	Reply    bool
}

// Encode implements Expression.
func (t Tuple) Encode() []byte {
	direction := byte(0) // IP_CT_DIR_ORIGINAL
	if t.Reply {
		direction = 1
	}
	var e nfnetlink.Encoder
	e.Text(unix.NFTA_EXPR_NAME, "ct")
	data := e.Open(unix.NFTA_EXPR_DATA)
	e.Uint32(unix.NFTA_CT_KEY, uint32(t.Key))
	e.Uint32(unix.NFTA_CT_DREG, t.Register)
	e.Bytes(unix.NFTA_CT_DIRECTION, []byte{direction})
	e.Close(data)
	return e.B
}
