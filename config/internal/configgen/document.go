package main

import (
	"fmt"
	"os"
	"strings"

	"fairlead.dev/fairlead/config"
)

// The lines of the document between which the tables are.
const (
	tablesBegin = "<!-- written by config/internal/configgen from here -->\n"
	tablesEnd   = "<!-- to here -->\n"
)

// writeTables renews the tables of the document: one for each heading of the help.
func writeTables(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	before, rest, found := strings.Cut(string(text), tablesBegin)
	_, after, ended := strings.Cut(rest, tablesEnd)
	if !found || !ended {
		return fmt.Errorf("%s: there is no %q followed by %q", path, tablesBegin, tablesEnd)
	}
	return os.WriteFile(path, []byte(before+tablesBegin+tables()+tablesEnd+after), 0o644)
}

func tables() string {
	var out strings.Builder
	var groups []string
	rows := map[string][]string{}
	for _, f := range config.Fields() {
		if rows[f.Group] == nil {
			groups = append(groups, f.Group)
		}
		rows[f.Group] = append(rows[f.Group], row(f))
	}
	for _, group := range groups {
		fmt.Fprintf(&out, "\n### %s%s\n\n", strings.ToUpper(group[:1]), group[1:])
		out.WriteString("| field | flag | default | meaning | a change takes effect |\n|---|---|---|---|---|\n")
		out.WriteString(strings.Join(rows[group], ""))
	}
	out.WriteString("\n")
	return out.String()
}

func row(f config.Field) string {
	code := func(text string) string {
		if text == "" {
			return ""
		}
		return "`" + text + "`"
	}
	flag := f.Flag
	if flag != "" {
		flag = "--" + flag
	}
	effect := map[config.Class]string{
		config.NoEffect: "–", config.AtStart: "at the next start", config.InPlace: "in place",
		config.OnTable: "on the rows", config.Rebuild: "by rebuilding",
	}[f.Takes]
	meaning := strings.ReplaceAll(f.Meaning, "|", "\\|")
	return fmt.Sprintf("| %s | %s | %s | %s | %s |\n", code(f.Path), code(flag), code(f.Default), meaning, effect)
}
