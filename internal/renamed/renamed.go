// Package renamed has the names that users know from the release before. This release accepts or serves them beside the
// new ones. The next release removes them, and this package if no name has changed since.
//
//	metrics ─► series under both names          config ─► field or flag under both names, with a warning
//	lab/configgen ─► docs/configuration.md      JSON ─► fields that are marked as deprecated in their structs
package renamed

// Kind says what has the name.
type Kind string

// The kinds. A key is one of the JSON that a command prints.
const (
	Metric Kind = "metric"
	Field  Kind = "field"
	Flag   Kind = "flag"
	Key    Kind = "JSON"
)

// Name is a name that has changed. Fields and keys are paths.
type Name struct {
	Kind     Kind
	Command  string // that prints a key
	Old, New string
	// OldLabel and NewLabel are the label of a metric that has changed; empty: none.
	OldLabel, NewLabel string
}

var all = []Name{
	{Kind: Metric, Old: "fairlead_failures_in_a_row", New: "fairlead_consecutive_programming_failures"},
	{Kind: Metric, Old: "fairlead_lost_connections_total", New: "fairlead_unanswered_connections_total"},
	{Kind: Metric, Old: "fairlead_partial", New: "fairlead_partially_programmed"},
	{Kind: Metric, Old: "fairlead_rescued_connections_total", New: "fairlead_retried_connections_total"},
	{Kind: Metric, Old: "fairlead_rules_undone_seconds", New: "fairlead_repairs_undone_seconds",
		OldLabel: "by", NewLabel: "author"},
	{Kind: Metric, Old: "fairlead_table_yielded_total", New: "fairlead_table_evictions_total"},
	{Kind: Metric, Old: "fairlead_unchecked_seconds", New: "fairlead_audit_unfinished_seconds"},
	{Kind: Metric, Old: "fairlead_waiting_seconds", New: "fairlead_oldest_pending_change_seconds"},

	{Kind: Field, Old: "userspace.flowTimeout", New: "userspace.udpTimeout"},
	{Kind: Field, Old: "userspace.streamTimeout", New: "userspace.udpStreamTimeout"},
	{Kind: Flag, Old: "userspace-flow-timeout", New: "userspace-udp-timeout"},
	{Kind: Flag, Old: "userspace-stream-timeout", New: "userspace-udp-stream-timeout"},

	{Kind: Key, Command: "audit", Old: "foreign", New: "externalChanges"},
	{Kind: Key, Command: "audit", Old: "lacking", New: "refused"},
	{Kind: Key, Command: "dump --counters", Old: "dials.lost", New: "dials.unanswered"},
	{Kind: Key, Command: "dump --counters", Old: "dials.rescued", New: "dials.retried"},
	{Kind: Key, Command: "dump --counters", Old: "tables.yielded", New: "tables.evictions"},
	{Kind: Key, Command: "explain", Old: "leftOut", New: "excluded"},
	{Kind: Key, Command: "status", Old: "carrying", New: "draining"},
	{Kind: Key, Command: "status", Old: "uncheckedSince", New: "auditUnfinishedSince"},
	{Kind: Key, Command: "status", Old: "undone.by", New: "undone.author"},
}

// Of are the names of a kind.
func Of(k Kind) (names []Name) {
	for _, n := range all {
		if n.Kind == k {
			names = append(names, n)
		}
	}
	return names
}
