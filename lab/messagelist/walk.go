package main

import (
	"fmt"
	"go/ast"
	"go/constant"
	"go/token"
	"go/types"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/tools/go/packages"
)

const module = "fairlead.dev/fairlead/"

// use is what becomes of a text.
type use struct {
	kind string
	part bool   // of a longer text: a single word is no message then
	far  bool   // the text passes variables, fields, parameters or functions before
	keys string // that a line of the log has beside it
}

// walker is at one package at a time, and visits all of them until it finds no mark that is new.
type walker struct {
	list
	marks  map[string]map[use]bool // what becomes of what an object holds, or returns
	params map[string][]string     // of functions: the parameters' names as objects
	fresh  bool                    // a mark was added in this round
	pkg    *packages.Package
}

func collect() (*list, error) {
	config := &packages.Config{Mode: packages.NeedName | packages.NeedFiles | packages.NeedSyntax | packages.NeedTypes |
		packages.NeedTypesInfo | packages.NeedImports,
		Env: append(os.Environ(), "GOARCH=amd64")} // the same texts on all machines
	all, err := packages.Load(config, module+"...")
	if err != nil {
		return nil, err
	}
	w := &walker{list: list{map[message]use{}, map[string]bool{}}, marks: map[string]map[use]bool{},
		params: map[string][]string{}}
	for w.fresh = true; w.fresh; {
		w.fresh = false
		for _, p := range all {
			if len(p.Errors) > 0 {
				return nil, p.Errors[0]
			}
			if !speaks(strings.TrimPrefix(p.PkgPath, module)) {
				continue
			}
			w.pkg = p
			for _, f := range p.Syntax {
				w.visit(f, "")
			}
		}
	}
	return &w.list, nil
}

// speaks reports whether operators read what a package prints: the agent, and what its commands demo and recommend run.
func speaks(path string) bool {
	switch path {
	case "lab/demo", "lab/advise":
		return true
	case "metrics/list":
		return false
	}
	return !strings.HasPrefix(path, "lab/")
}

// visit walks what is below a node, in the function of that name.
func (w *walker) visit(root ast.Node, function string) {
	ast.Inspect(root, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			name := w.name(w.pkg.TypesInfo.Defs[n.Name])
			w.declare(name, n.Type)
			w.methods(n, name)
			if n.Body != nil {
				w.visit(n.Body, name)
			}
			return false
		case *ast.FuncLit:
			name := w.literal(n)
			w.declare(name, n.Type)
			w.visit(n.Body, name)
			return false
		case *ast.ReturnStmt:
			w.returns(n, function)
		case *ast.AssignStmt:
			w.assign(n.Lhs, n.Rhs)
		case *ast.ValueSpec:
			var names []ast.Expr
			for _, name := range n.Names {
				names = append(names, name)
			}
			w.assign(names, n.Values)
		case *ast.RangeStmt:
			if n.Value != nil {
				w.flow(n.Value, n.X)
			}
		case *ast.TypeSpec:
			w.declaredFields(n)
		case *ast.CompositeLit:
			w.composite(n)
		case *ast.CallExpr:
			w.call(n)
		}
		return true
	})
}

// name is that of an object wherever it is seen from: a package that is imported has other objects than its source.
func (w *walker) name(o types.Object) string {
	switch o := o.(type) {
	case nil:
		return ""
	case *types.Func:
		return o.Origin().FullName()
	case *types.Var:
		at := w.pkg.Fset.Position(o.Origin().Pos())
		dir, file := filepath.Split(at.Filename)
		return fmt.Sprint(filepath.Base(dir), "/", file, ":", at.Line, " ", o.Name())
	}
	return ""
}

func (w *walker) literal(f *ast.FuncLit) string {
	return "func " + w.pkg.Fset.Position(f.Pos()).String()
}

// result names a result of a function, as an object.
func result(function string, i int) string { return fmt.Sprint(function, " → ", i) }

// declare notes the parameters of a function, and that its named results are what it returns.
func (w *walker) declare(name string, f *ast.FuncType) {
	var all []string
	for _, p := range f.Params.List {
		for _, n := range p.Names {
			all = append(all, w.name(w.pkg.TypesInfo.Defs[n]))
		}
		if len(p.Names) == 0 {
			all = append(all, "")
		}
	}
	w.params[name] = all
	if f.Results == nil {
		return
	}
	i := 0
	for _, r := range f.Results.List {
		for _, n := range r.Names {
			for u := range w.marks[result(name, i)] {
				w.mark(w.name(w.pkg.TypesInfo.Defs[n]), u)
			}
			i++
		}
	}
}

// methods marks what Error and String return.
func (w *walker) methods(f *ast.FuncDecl, name string) {
	if f.Recv == nil || f.Type.Params.NumFields() > 0 {
		return
	}
	switch f.Name.Name {
	case "Error":
		w.mark(result(name, 0), use{kind: "failure", part: true})
	case "String":
		w.mark(result(name, 0), use{kind: "text", part: true})
	}
}

func (w *walker) mark(object string, u use) {
	u.keys, u.far = "", true
	if object == "" || w.marks[object][u] {
		return
	}
	if w.marks[object] == nil {
		w.marks[object] = map[use]bool{}
	}
	w.marks[object][u] = true
	w.fresh = true
}

func (w *walker) returns(r *ast.ReturnStmt, function string) {
	for i, e := range r.Results {
		for u := range w.marks[result(function, i)] {
			w.text(e, u)
		}
	}
	if call, ok := single(r.Results); ok {
		for i := range w.results(call) {
			for u := range w.marks[result(function, i)] {
				w.mark(result(w.callee(call), i), u)
			}
		}
	}
}

// single is a call that is the only expression of several.
func single(all []ast.Expr) (*ast.CallExpr, bool) {
	if len(all) != 1 {
		return nil, false
	}
	call, ok := all[0].(*ast.CallExpr)
	return call, ok
}

// results is how many a call has.
func (w *walker) results(call *ast.CallExpr) int {
	if t, ok := w.pkg.TypesInfo.TypeOf(call).(*types.Tuple); ok {
		return t.Len()
	}
	return 0
}

func (w *walker) assign(to, from []ast.Expr) {
	if call, ok := single(from); ok && len(to) > 1 {
		for i, e := range to {
			for u := range w.marks[w.object(e)] {
				w.mark(result(w.callee(call), i), u)
			}
		}
		return
	}
	for i := range min(len(to), len(from)) {
		w.flow(to[i], from[i])
		if f, ok := from[i].(*ast.FuncLit); ok { // a function that is called by the variable's name
			w.params[w.object(to[i])] = w.params[w.literal(f)]
		}
	}
}

// flow has what one expression gets come from another one.
func (w *walker) flow(to, from ast.Expr) {
	for u := range w.marks[w.object(to)] {
		w.text(from, u)
	}
}

// object names the variable, field or function that an expression is.
func (w *walker) object(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return w.name(w.pkg.TypesInfo.ObjectOf(e))
	case *ast.SelectorExpr:
		return w.name(w.pkg.TypesInfo.ObjectOf(e.Sel))
	case *ast.IndexExpr:
		return w.object(e.X)
	case *ast.IndexListExpr:
		return w.object(e.X)
	case *ast.SliceExpr:
		return w.object(e.X)
	case *ast.ParenExpr:
		return w.object(e.X)
	case *ast.StarExpr:
		return w.object(e.X)
	case *ast.FuncLit:
		return w.literal(e)
	}
	return ""
}

func (w *walker) callee(call *ast.CallExpr) string { return w.object(call.Fun) }

// composite has texts in a literal: those in fields that are marked.
func (w *walker) composite(c *ast.CompositeLit) {
	t := w.pkg.TypesInfo.TypeOf(c)
	if p, ok := t.Underlying().(*types.Pointer); ok {
		t = p.Elem()
	}
	s, ok := t.Underlying().(*types.Struct)
	if !ok {
		return
	}
	for i, e := range c.Elts {
		var field types.Object
		if pair, ok := e.(*ast.KeyValueExpr); ok {
			field, e = w.pkg.TypesInfo.ObjectOf(pair.Key.(*ast.Ident)), pair.Value
		} else {
			field = s.Field(i)
		}
		if kind := fields[types.TypeString(t, nil)][field.Name()]; kind != "" {
			w.text(e, use{kind: kind})
			continue
		}
		for u := range w.marks[w.name(field)] {
			w.text(e, u)
		}
	}
}

// text follows an expression to the texts that it can be.
func (w *walker) text(e ast.Expr, u use) {
	if u.kind == keyed {
		w.keyList(e)
		return
	}
	if v := w.pkg.TypesInfo.Types[e].Value; v != nil {
		if v.Kind() == constant.String {
			w.add(constant.StringVal(v), u)
		}
		return
	}
	switch e := e.(type) {
	case *ast.ParenExpr:
		w.text(e.X, u)
	case *ast.BinaryExpr:
		if e.Op == token.ADD {
			w.add(w.sum(e, u), u)
		}
	case *ast.Ident, *ast.SelectorExpr, *ast.IndexExpr, *ast.SliceExpr, *ast.StarExpr:
		w.mark(w.object(e), u)
	case *ast.CompositeLit:
		w.elements(e, u)
	case *ast.UnaryExpr:
		w.text(e.X, u)
	case *ast.CallExpr:
		w.made(e, u)
	}
}

// sum is the text of a sum, in which %s stands for what no constant is. That is followed too.
func (w *walker) sum(e ast.Expr, u use) string {
	if v := w.pkg.TypesInfo.Types[e].Value; v != nil && v.Kind() == constant.String {
		return constant.StringVal(v)
	}
	if b, ok := e.(*ast.BinaryExpr); ok {
		return w.sum(b.X, u) + w.sum(b.Y, u)
	}
	u.part = true
	w.text(e, u)
	return "%s"
}

// elements are the texts in a slice, array or map.
func (w *walker) elements(c *ast.CompositeLit, u use) {
	if _, ok := w.pkg.TypesInfo.TypeOf(c).Underlying().(*types.Struct); ok {
		return
	}
	for _, e := range c.Elts {
		if pair, ok := e.(*ast.KeyValueExpr); ok {
			e = pair.Value
		}
		w.text(e, u)
	}
}

// made follows what a call returns.
func (w *walker) made(call *ast.CallExpr, u use) {
	name := w.callee(call)
	pkg, _, _ := strings.Cut(name, ".")
	switch {
	case w.pkg.TypesInfo.Types[call.Fun].IsType():
		w.text(call.Args[0], u)
	case name == "fmt.Sprintf":
		w.text(call.Args[0], u)
		w.parts(call.Args[1:], u)
	case pkg == "strings" || pkg == "fmt" || name == "cmp.Or" || w.builtin(call, "append"):
		w.parts(call.Args, u)
	case isError(w.pkg.TypesInfo.TypeOf(call)): // its texts are found where it is made
	default:
		w.mark(result(name, 0), u)
	}
}

func (w *walker) parts(all []ast.Expr, u use) {
	u.part = true
	for _, e := range all {
		w.text(e, u)
	}
}

func (w *walker) builtin(call *ast.CallExpr, name string) bool {
	id, ok := call.Fun.(*ast.Ident)
	return ok && id.Name == name && w.pkg.TypesInfo.Types[call.Fun].IsBuiltin()
}

func isError(t types.Type) bool { return t != nil && types.TypeString(t, nil) == "error" }

func (w *walker) add(text string, u use) {
	w.list.add(strings.TrimPrefix(w.pkg.PkgPath, module), text, u)
}
