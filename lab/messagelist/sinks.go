package main

import (
	"go/ast"
	"go/constant"
	"go/types"
	"strings"
)

// sink is what a function of another module shows to people.
type sink struct {
	kind  string
	text  int  // the argument that is a text
	all   bool // those after it are texts too
	parts bool // those after it may be parts of the text
}

// sinks by the names of functions. Those of the log and of flags are found by their methods and parameters.
var sinks = map[string]sink{
	"errors.New":     {kind: "failure"},
	"fmt.Errorf":     {kind: "failure", parts: true},
	"fmt.Print":      {kind: "print", all: true},
	"fmt.Println":    {kind: "print", all: true},
	"fmt.Printf":     {kind: "print", parts: true},
	"fmt.Fprint":     {kind: "print", text: 1, all: true},
	"fmt.Fprintln":   {kind: "print", text: 1, all: true},
	"fmt.Fprintf":    {kind: "print", text: 1, parts: true},
	"fmt.Appendf":    {kind: "print", text: 1, parts: true},
	"io.WriteString": {kind: "print", text: 1},
	"net/http.Error": {kind: "print", text: 1},

	"k8s.io/apimachinery/pkg/util/validation/field.Invalid":     {kind: "failure", text: 2},
	"k8s.io/apimachinery/pkg/util/validation/field.Forbidden":   {kind: "failure", text: 1},
	"k8s.io/apimachinery/pkg/util/validation/field.Required":    {kind: "failure", text: 1},
	"k8s.io/apimachinery/pkg/util/validation/field.TypeInvalid": {kind: "failure", text: 2},
}

// fields that are texts, by the types that have them.
var fields = map[string]map[string]string{
	module + "service.Problem":       {"Reason": "problem"},
	module + "source/kube.Event":     {"Reason": "event", "Message": "event"},
	"github.com/spf13/cobra.Command": {"Use": "help", "Short": "help", "Long": "help", "Example": "help"},
}

// keyed is the kind of what holds keys and values of the log in turn.
const keyed = "keys"

func (w *walker) call(call *ast.CallExpr) {
	name := w.callee(call)
	if s, ok := sinks[name]; ok {
		w.sink(call, s)
		return
	}
	if method, ok := strings.CutPrefix(name, "(*log/slog.Logger)."); ok {
		w.log(call, method)
		return
	}
	if name == "log/slog.Group" {
		w.keysOf(call, 1)
		return
	}
	if f, ok := w.pkg.TypesInfo.TypeOf(call.Fun).(*types.Signature); ok && strings.Contains(name, "spf13/pflag") {
		if last := f.Params().Len() - 1; last > 0 && f.Params().At(last).Name() == "usage" {
			w.text(call.Args[last], use{kind: "help"})
		}
		return
	}
	w.arguments(call, w.params[name])
}

func (w *walker) sink(call *ast.CallExpr, s sink) {
	for i, e := range call.Args {
		switch {
		case i == s.text || i > s.text && s.all:
			w.text(e, use{kind: s.kind})
		case i > s.text && s.parts:
			w.text(e, use{kind: s.kind, part: true})
		}
	}
}

// log has a call of a logger: its message, and the keys beside it.
func (w *walker) log(call *ast.CallExpr, method string) {
	kind, text := strings.ToLower(strings.TrimSuffix(method, "Context")), 0
	switch kind {
	case "with":
		w.keysOf(call, 0)
		return
	case "log", "logattrs":
		kind, text = "log", 2
	case "debug", "info", "warn", "error":
		if strings.HasSuffix(method, "Context") {
			text = 1
		}
	default:
		return
	}
	w.text(call.Args[text], use{kind: kind, keys: w.keysOf(call, text+1)})
}

// arguments has a call of a function of this module.
func (w *walker) arguments(call *ast.CallExpr, params []string) {
	keys := ""
	for i, p := range params {
		if w.marks[p][use{kind: keyed, far: true}] && i <= len(call.Args) {
			keys = w.keysOf(call, i)
		}
	}
	for i, e := range call.Args {
		if len(params) == 0 {
			return
		}
		for u := range w.marks[params[min(i, len(params)-1)]] {
			if u.kind != keyed {
				u.keys = keys
				w.text(e, u)
			}
		}
	}
}

// keysOf are the keys among the arguments of a call from one on.
func (w *walker) keysOf(call *ast.CallExpr, from int) string {
	if call.Ellipsis.IsValid() {
		w.text(call.Args[len(call.Args)-1], use{kind: keyed})
		return "…"
	}
	return w.keysIn(call.Args[from:])
}

func (w *walker) keysIn(all []ast.Expr) string {
	var keys []string
	for i := 0; i < len(all); i++ {
		e := all[i]
		if call, ok := e.(*ast.CallExpr); ok && types.TypeString(w.pkg.TypesInfo.TypeOf(e), nil) == "log/slog.Attr" {
			e = call.Args[0]
		} else {
			i++
		}
		if v := w.pkg.TypesInfo.Types[e].Value; v != nil && v.Kind() == constant.String {
			keys = append(keys, constant.StringVal(v))
			w.keys[constant.StringVal(v)] = true
		}
	}
	return strings.Join(keys, ", ")
}

// keyList has an expression that holds keys and values in turn.
func (w *walker) keyList(e ast.Expr) {
	switch e := e.(type) {
	case *ast.CompositeLit:
		w.keysIn(e.Elts)
	case *ast.CallExpr:
		if w.builtin(e, "append") {
			w.keyList(e.Args[0])
			if e.Ellipsis.IsValid() {
				w.keyList(e.Args[1])
			} else {
				w.keysIn(e.Args[1:])
			}
		} else {
			w.mark(result(w.callee(e), 0), use{kind: keyed})
		}
	default:
		w.mark(w.object(e), use{kind: keyed})
	}
}

// declaredFields marks the fields of a type that are texts.
func (w *walker) declaredFields(t *ast.TypeSpec) {
	s, ok := t.Type.(*ast.StructType)
	if !ok {
		return
	}
	texts := fields[w.pkg.PkgPath+"."+t.Name.Name]
	for _, f := range s.Fields.List {
		for _, n := range f.Names {
			if kind := texts[n.Name]; kind != "" {
				w.mark(w.name(w.pkg.TypesInfo.Defs[n]), use{kind: kind})
			}
		}
	}
}
