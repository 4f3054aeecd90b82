// Package report says what a study has found: on a terminal, in Markdown, and as one page for a browser that needs
// neither a network nor scripts.
//
//	study.Result ─► Statistics: medians, ratios to direct access with their bounds, exponents
//	                    ├─► scoreboard: what matters, by mode ─► Decision: the advice, in three sentences
//	                    ├─► Verdicts on what others have published
//	                    ├─► exhibits: published figures and those of here ─► tables, charts
//	                    ├─► Text, Markdown, HTML of all that; Benchmarks for benchstat
//	                    └─► Compare, with those of another Result
//
// Nothing is claimed for a difference that is no larger than the one between the control and its copy.
package report
