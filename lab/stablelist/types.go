package main

import (
	"errors"
	"fmt"
	"go/ast"
	"go/types"
	"os"
	"reflect"
	"slices"
	"strings"

	"golang.org/x/tools/go/packages"
)

const module = "fairlead.dev/fairlead/"

// printed are the types of what commands print with -o json. "[]" before a type says that there is a list of them.
var printed = []struct{ command, of string }{
	{"fairlead audit", "engine.Audited"},
	{"fairlead bench", "lab/study.Result"},
	{"fairlead bench --list", "[]lab/study.Description"},
	{"fairlead bench compare", "lab/study/report.Changes"},
	{"fairlead bench failover", "[]lab/study.FailoverRow"},
	{"fairlead demo", "lab/demo.outcome"},
	{"fairlead dump", "model.State"},
	{"fairlead dump --counters", "dataplane.Counters"},
	{"fairlead explain", "service.Explanation"},
	{"fairlead migrate", "plugin/migrate.Report"},
	{"fairlead migrate --apply", "daemon.SwitchStep"},
	{"fairlead migrate --watch", "plugin/migrate.Watched"},
	{"fairlead monitor", "recorder.Event"},
	{"fairlead probe", "[]plugin.probed"},
	{"fairlead recommend", "lab/advise.Report"},
	{"fairlead services", "engine.Services"},
	{"fairlead services --watch", "engine.ServiceReport"},
	{"fairlead status", "plugin/answer.Status"},
	{"fairlead switch", "daemon.SwitchStep"},
	{"fairlead trace", "plugin/trace.Answer"},
	{"fairlead verify", "lab/verify.Report"},
	{"fairlead why", "plugin/answer.Findings"},
	{"kubectl fairlead status", "[]cmd/kubectl-fairlead.nodeStatus"},
	{"kubectl fairlead why", "[]cmd/kubectl-fairlead.nodeFindings"},
}

// passed are commands that print what the agent of a node prints.
var passed = []string{"kubectl fairlead audit", "kubectl fairlead explain", "kubectl fairlead services"}

// typed lists what the types and constants of the code say. Formats are commands that print JSON.
func typed(formats []string) (lines []string, err error) {
	for _, command := range formats {
		if !slices.Contains(passed, command) && !slices.ContainsFunc(printed, func(p struct{ command, of string }) bool {
			return p.command == command
		}) {
			err = errors.Join(err, fmt.Errorf("%s prints JSON: add its type to the table in lab/stablelist/types.go", command))
		}
	}
	if err != nil {
		return nil, err
	}
	c, err := load()
	if err != nil {
		return nil, err
	}
	for _, p := range printed {
		c.at = "json " + p.command + " "
		name, list := strings.CutPrefix(p.of, "[]")
		path, name, _ := strings.Cut(name, ".")
		in := c.packages[module+path]
		if in == nil || in.Types.Scope().Lookup(name) == nil {
			return nil, fmt.Errorf("there is no type %s, which %s should print", p.of, p.command)
		}
		below := ""
		if list {
			below = "[]"
		}
		if err := c.value(in.Types.Scope().Lookup(name).Type(), below); err != nil {
			return nil, fmt.Errorf("%s: %w", p.command, err)
		}
	}
	// The type of a Service that is gone is that of a text in the code.
	c.lines = append(c.lines, "json fairlead services --watch gone boolean")
	return append(c.lines, c.exits()...), nil
}

// code is the source of the module.
type code struct {
	packages map[string]*packages.Package
	at       string // begins a line
	lines    []string
}

func load() (*code, error) {
	all, err := packages.Load(&packages.Config{
		Mode: packages.NeedName | packages.NeedFiles | packages.NeedSyntax | packages.NeedTypes | packages.NeedTypesInfo |
			packages.NeedImports,
		Env: append(os.Environ(), "GOARCH=amd64"), // the same names on all machines
	}, module+"...")
	if err != nil {
		return nil, err
	}
	c := &code{packages: map[string]*packages.Package{}}
	for _, p := range all {
		if len(p.Errors) > 0 {
			return nil, p.Errors[0]
		}
		c.packages[p.PkgPath] = p
	}
	return c, nil
}

// exits are the exit statuses: constants whose names say what each one means.
func (c *code) exits() (lines []string) {
	for _, path := range []string{"internal/cli", "lab/cmd/fairlead-lab"} {
		in := c.packages[module+path].Types.Scope()
		for _, name := range in.Names() {
			meaning, is := strings.CutPrefix(strings.ToLower(name), "exit")
			if v, constant := in.Lookup(name).(*types.Const); is && constant {
				lines = append(lines, fmt.Sprintf("exit %s %s", v.Val(), meaning))
			}
		}
	}
	return lines
}

// value lists what encoding/json makes of a type, below a path.
func (c *code) value(t types.Type, path string) error {
	t = types.Unalias(t)
	if p, is := t.(*types.Pointer); is {
		return c.value(p.Elem(), path)
	}
	if marshals, is := method(t, "MarshalJSON"); is {
		return c.marshalled(t, marshals, path)
	}
	if _, is := method(t, "MarshalText"); is {
		c.leaf(path, "string")
		return nil
	}
	switch u := t.Underlying().(type) {
	case *types.Basic:
		kind := "number"
		switch {
		case u.Info()&types.IsString != 0:
			kind = "string"
		case u.Info()&types.IsBoolean != 0:
			kind = "boolean"
		}
		c.leaf(path, kind)
	case *types.Interface:
		c.leaf(path, "any")
	case *types.Slice:
		return c.value(u.Elem(), path+"[]")
	case *types.Array:
		return c.value(u.Elem(), path+"[]")
	case *types.Map:
		return c.value(u.Elem(), path+"{}")
	case *types.Struct:
		return c.object(u, path)
	default:
		return fmt.Errorf("%s: what does encoding/json make of %s?", path, t)
	}
	return nil
}

func (c *code) leaf(path, kind string) { c.lines = append(c.lines, c.at+path+" "+kind) }

// method is one of a type, or of what it embeds.
func method(t types.Type, name string) (*types.Func, bool) {
	if types.IsInterface(t) {
		return nil, false
	}
	selection := types.NewMethodSet(types.NewPointer(t)).Lookup(nil, name)
	if selection == nil {
		return nil, false
	}
	f, is := selection.Obj().(*types.Func)
	return f, is
}

// marshalled lists what a method of this module gives to json.Marshal.
func (c *code) marshalled(t types.Type, method *types.Func, path string) error {
	in := c.packages[method.Pkg().Path()]
	if in == nil {
		kind := "any"
		if t.String() == "time.Time" {
			kind = "string"
		}
		c.leaf(path, kind)
		return nil
	}
	var given []types.Type
	for _, file := range in.Syntax {
		for _, d := range file.Decls {
			f, is := d.(*ast.FuncDecl)
			if !is || in.TypesInfo.Defs[f.Name].(*types.Func).FullName() != method.FullName() {
				continue
			}
			ast.Inspect(f, func(n ast.Node) bool {
				if call, is := n.(*ast.CallExpr); is && types.ExprString(call.Fun) == "json.Marshal" {
					given = append(given, in.TypesInfo.TypeOf(call.Args[0]))
				}
				return true
			})
		}
	}
	if len(given) == 0 {
		return fmt.Errorf("%s does not call json.Marshal", method.FullName())
	}
	for _, t := range given {
		if err := c.value(t, path); err != nil {
			return err
		}
	}
	return nil
}

// object lists the fields of a struct: those of what it embeds are its own, unless it has one of that name.
func (c *code) object(s *types.Struct, path string) error {
	seen := map[string]bool{}
	for level := []*types.Struct{s}; len(level) > 0; {
		var below []*types.Struct
		var here []string
		for _, s := range level {
			for i := range s.NumFields() {
				f := s.Field(i)
				name, _, _ := strings.Cut(reflect.StructTag(s.Tag(i)).Get("json"), ",")
				if inner, is := embedded(f); is && name == "" {
					below = append(below, inner)
					continue
				}
				if name == "" {
					name = f.Name()
				}
				if name == "-" || !f.Exported() || seen[name] {
					continue
				}
				here = append(here, name)
				if err := c.value(f.Type(), strings.TrimPrefix(path+"."+name, ".")); err != nil {
					return err
				}
			}
		}
		for _, name := range here {
			seen[name] = true
		}
		level = below
	}
	return nil
}

func embedded(f *types.Var) (*types.Struct, bool) {
	t := types.Unalias(f.Type())
	if p, is := t.(*types.Pointer); is {
		t = p.Elem()
	}
	s, is := t.Underlying().(*types.Struct)
	return s, is && f.Embedded()
}
