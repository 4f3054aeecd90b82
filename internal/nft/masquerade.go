package nft

import (
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nfnetlink"
)

// PortRange are the ports from First to Last.
type PortRange struct{ First, Last uint16 }

// masqueradeTo gives a connection any port of those between two registers. (expr.Masq leaves the flags out where there
// are ports, and so lets two connections that begin at the same moment get the same one.)
type masqueradeTo struct{ first, last uint32 }

// Encode implements Expression.
func (m masqueradeTo) Encode() []byte {
	var e nfnetlink.Encoder
	e.Text(unix.NFTA_EXPR_NAME, "masq")
	data := e.Open(unix.NFTA_EXPR_DATA)
	e.Uint32(unix.NFTA_MASQ_FLAGS, expr.NF_NAT_RANGE_PROTO_SPECIFIED|expr.NF_NAT_RANGE_PROTO_RANDOM_FULLY)
	e.Uint32(unix.NFTA_MASQ_REG_PROTO_MIN, m.first)
	e.Uint32(unix.NFTA_MASQ_REG_PROTO_MAX, m.last)
	e.Close(data)
	return e.B
}
