// Package report says what a study has found: on a terminal, in Markdown, and as one page for a browser that needs no
// network.
//
//	study.Result ─► Statistics: medians, ratios to direct access with their bounds, exponents
//	                    ├─► Verdicts on what others have published
//	                    ├─► Advice, by the rules of fairlead recommend
//	                    ├─► sections, blocks ─► tables, charts ─► Text, Markdown, HTML
//	                    └─► Compare, with those of another Result
//
// Nothing is claimed for a difference that is no larger than the one between the control and its copy.
package report
