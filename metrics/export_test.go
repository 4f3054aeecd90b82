package metrics

import "net/http"

// Own serves what is about Fairlead, without the facts of the whole process.
func (m *Metrics) Own() http.Handler { return handler(m.registry.kube) }
