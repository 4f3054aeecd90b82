package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"

	"github.com/spf13/pflag"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/daemon"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/service"
)

// Inspection asks the running daemon or, if manifests are named, computes the answer from them.
type Inspection struct {
	Flags  *config.Flags
	Output string // text or json

	table *service.Table // of the manifests, once it was asked for
}

// offlineFlags are those of run that matter for the rows.
var offlineFlags = []string{
	"config", "fairlead-config", "proxy-mode", "hostname-override", "node-ip", "bind-address",
	"cluster-cidr", "detect-local-mode", "pod-bridge-interface", "pod-interface-name-prefix",
	"nodeport-addresses", "iptables-localhost-nodeports", "masquerade-all", "feature-gates",
}

// AddTo adds the flags of a command that asks the running daemon only.
func (i *Inspection) AddTo(f *pflag.FlagSet) {
	i.Flags = NewFlags()
	f.SortFlags = false
	f.StringVarP(&i.Output, "output", "o", "text", "text or json")
	socket := Lookup(i.Flags, "control-socket")
	socket.Usage = "the running proxy"
	f.AddFlag(socket)
}

// AddOfflineTo adds those of one that can do without.
func (i *Inspection) AddOfflineTo(f *pflag.FlagSet) {
	i.AddTo(f)
	manifests := Lookup(i.Flags, "manifests")
	manifests.Usage = "compute the answer from this `file or directory`, not from the running proxy (repeatable)"
	f.AddFlag(manifests)
	for _, name := range offlineFlags {
		f.AddFlag(Lookup(i.Flags, name))
	}
}

// Check refuses a value of --output that there is not.
func (i *Inspection) Check() error {
	if i.Output != "text" && i.Output != "json" {
		return Misused(fmt.Errorf("--output: %q is neither text nor json", i.Output))
	}
	return nil
}

// Offline compiles the manifests. Problems other than warnings are printed, one a line.
func (i *Inspection) Offline(ctx context.Context) (*service.Table, error) {
	if i.table != nil {
		return i.table, nil
	}
	c, err := i.Flags.Load()
	if err != nil {
		return nil, Misused(err)
	}
	table, problems, err := daemon.Compile(ctx, c, daemon.NewLogs(io.Discard))
	for _, p := range problems {
		if p.Cause != service.Warning { // which is about objects that no question is about
			fmt.Fprintf(os.Stderr, "%s: %s\n", p.Word(), p.Error())
		}
	}
	i.table = table
	return table, ConfigError(err)
}

// IsOffline reports whether manifests are named.
func (i *Inspection) IsOffline() bool { return Lookup(i.Flags, "manifests").Changed }

// Ask puts a question to the running proxy. Without one, the answer can be computed.
func (i *Inspection) Ask(ctx context.Context, path string, q url.Values) ([]byte, error) {
	if i.Output == "json" {
		q.Set("format", "json")
	}
	answer, err := i.Answer(ctx, path+"?"+q.Encode())
	if errors.Is(err, ErrNoProxy) {
		return nil, Misused(fmt.Errorf("%w, or name --manifests", err))
	}
	return answer, Failed(err)
}

// ErrNoProxy is wrapped by errors of questions that no running proxy answers.
var ErrNoProxy = errors.New("no proxy listens")

// Answer is the running proxy's to a question; the error is ErrNoProxy if there is none.
func (i *Inspection) Answer(ctx context.Context, question string) ([]byte, error) {
	answer, err := i.Order(ctx, http.MethodGet, question)
	if err != nil {
		return nil, err
	}
	defer answer.Close()
	return io.ReadAll(answer)
}

// Order is answer for what is not only a question.
func (i *Inspection) Order(ctx context.Context, method, what string) (io.ReadCloser, error) {
	socket := Lookup(i.Flags, "control-socket").Value.String()
	answer, err := engine.Order(ctx, socket, method, what)
	if engine.Absent(err) {
		return nil, fmt.Errorf("%w on %s; start \"fairlead run\"", ErrNoProxy, socket)
	}
	return answer, err
}

// Print writes what the user asked for; text has its own line end.
func (i *Inspection) Print(v fmt.Stringer) error {
	if i.Output == "text" {
		fmt.Print(v)
		return nil
	}
	return PrintJSON(v)
}
