package tracked

import "fairlead.dev/fairlead/internal/nfnetlink"

// ListByFilters is List as if there were very many flows: the kernel passes over those beyond each filter.
func ListByFilters(c *nfnetlink.Socket, wanted func(*Flow) bool, filters ...Filter) ([]Flow, error) {
	return list(c, 0, wanted, filters)
}
