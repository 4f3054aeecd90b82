package ipvs

import (
	"errors"
	"maps"

	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// refuse has the table refuse the clients of frontends whose virtual servers the kernel has not taken. Their addresses
// are the node's, so a process of the node that listens on the port would answer in their place. Frontends that it has
// taken meanwhile are served. Some says that it has just refused something.
func (k *kernel) refuse(table *nft.Transaction, some bool) error {
	candidates := maps.Keys(k.refused)
	if some {
		candidates = maps.Keys(k.frontends)
	}
	refused := map[model.Key]struct{}{}
	*k.tx = *table
	var errs []error
	for key := range candidates {
		f, exists := k.frontends[key]
		_, was := k.refused[key]
		switch {
		case exists && k.lacks(key, f):
			refused[key] = struct{}{}
			errs = append(errs, k.setFrontend(key, model.Frontend{Verdict: model.Reject, Allow: f.Allow}))
		case exists && was:
			errs = append(errs, k.setFrontend(key, f))
		}
	}
	*table, *k.tx = *k.tx, nft.Transaction{}
	k.refused = refused
	return errors.Join(errs...)
}

// lacks reports whether a frontend should have a virtual server and has none.
func (k *kernel) lacks(key model.Key, f model.Frontend) bool {
	return forwards(key, f) && k.servers.held[k.pools[f.Pool].server(key)] == nil
}

func (k *kernel) setFrontend(key model.Key, f model.Frontend) error {
	return k.tables[index(key.Addr.Is6())].setFrontend(key, f, true, k.pools[f.Pool])
}
