package config

import (
	"reflect"
	"slices"
	"strings"
)

// Field is a setting of one of the files, and what it means here.
type Field struct {
	Kind    string // of the file
	Path    string
	Flag    string // that says the same; empty: there is none
	Group   string // under which help shows the flag
	Default string // as JSON; empty: nothing
	Meaning string
	Takes   Class // what a change takes
}

// Fields are the settings of both files, in the order of the help.
func Fields() (fields []Field) {
	for _, o := range allOptions() {
		for _, path := range strings.Fields(o.field) {
			kind := KubeProxyKind
			if isOwn(path) {
				kind = FairleadKind
			}
			usage := strings.ReplaceAll(o.usage, "`", "")
			fields = append(fields, Field{Kind: kind, Path: path, Flag: o.flag, Group: o.group, Meaning: usage})
		}
	}
	plain := &Config{Fairlead: defaultFairlead()}
	setDefaults(&plain.KubeProxy)
	defaults := flatten(plain)
	for i := range fields {
		f := &fields[i]
		f.Default = defaults[f.Path]
		switch f.Takes = class(f.Path); {
		case f.Group == obsolete:
			f.Takes = NoEffect
		case f.Path == "featureGates":
			f.Takes = OnTable
			f.Meaning += ". The first changes rows; the last two take effect in place"
		}
	}
	return fields
}

// at is a field of a file's type, to which c points, by its path; it is not valid if there is none.
func at(c any, path string) reflect.Value {
	v := reflect.ValueOf(c).Elem()
	for name := range strings.SplitSeq(path, ".") {
		if v.Kind() != reflect.Struct {
			return reflect.Value{}
		}
		fields := reflect.VisibleFields(v.Type())
		i := slices.IndexFunc(fields, func(f reflect.StructField) bool {
			key, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			return key == name && key != "" && len(f.Index) == 1
		})
		if i < 0 {
			return reflect.Value{}
		}
		v = v.FieldByIndex(fields[i].Index)
	}
	return v
}

// isOwn reports whether a path is one of Fairlead's own file. It may go on to an item of a list.
func isOwn(path string) bool {
	path, _, _ = strings.Cut(path, "[")
	return at(&FairleadConfiguration{}, path).IsValid()
}
