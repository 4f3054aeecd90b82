// Package ask puts the questions of commands to the running agent, over its control socket. A command that can do
// without an agent computes the answer from manifests.
//
//	            ┌─ Get, Text, Lines ─► control socket ─► agent
//	command ────┤
//	            └─ Offline, with --manifests ─► service.Table
package ask

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/daemon"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/service"
)

// Inspection asks the running agent or, if manifests are named, computes the answer from them.
type Inspection struct {
	cli.Format
	Flags *config.Flags

	offline bool           // manifests may be named
	table   *service.Table // of the manifests, once it was asked for
}

// offlineFlags are those of run that matter for the rows.
var offlineFlags = []string{
	"config", "fairlead-config", "proxy-mode", "hostname-override", "node-ip", "bind-address",
	"cluster-cidr", "detect-local-mode", "pod-bridge-interface", "pod-interface-name-prefix",
	"nodeport-addresses", "iptables-localhost-nodeports", "masquerade-all", "feature-gates",
}

// AddTo adds the flags of a command that asks the running agent only. It refuses a value of --output that there is not.
func (i *Inspection) AddTo(c *cobra.Command) {
	c.Flags().SortFlags = false
	i.AddFormatTo(c)
	i.AddSocketTo(c.Flags())
}

// AddSocketTo adds the flag that names the running agent's socket.
func (i *Inspection) AddSocketTo(f *pflag.FlagSet) {
	i.Flags = daemon.NewFlags()
	socket := i.Flags.Lookup("control-socket")
	socket.Usage = "the running proxy"
	f.AddFlag(socket)
}

// AddOfflineTo adds the flags of a command that can do without an agent.
func (i *Inspection) AddOfflineTo(c *cobra.Command) {
	i.AddTo(c)
	f := c.Flags()
	i.offline = true
	manifests := i.Flags.Lookup("manifests")
	manifests.Usage = "compute the answer from this `file or directory`, not from the running proxy (repeatable)"
	f.AddFlag(manifests)
	for _, name := range offlineFlags {
		f.AddFlag(i.Flags.Lookup(name))
	}
}

// patience is how long an API server may take to show what there is.
const patience = 30 * time.Second

var errNotShown = fmt.Errorf("the API server has not shown all Services, EndpointSlices and Nodes within %s", patience)

// Offline compiles the manifests, or what an API server shows. It prints problems other than warnings, one a line, and
// why the API server does not answer.
func (i *Inspection) Offline(ctx context.Context) (*service.Table, error) {
	if i.table != nil {
		return i.table, nil
	}
	c, err := i.Flags.Load()
	if err != nil {
		return nil, cli.Misused(err)
	}
	logs := io.Discard
	if !i.IsOffline() {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, patience, errNotShown)
		defer cancel()
		logs = os.Stderr
	}
	table, problems, err := daemon.Compile(ctx, c, daemon.NewLogs(logs))
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	for _, p := range problems {
		if p.Cause != service.Warning { // which is about objects that no question is about
			fmt.Fprintf(os.Stderr, "%s: %s\n", p.Word(), p.Error())
		}
	}
	i.table = table
	return table, cli.ConfigError(err)
}

// IsOffline reports whether manifests are named.
func (i *Inspection) IsOffline() bool { return i.Flags.Lookup("manifests").Changed }

// Print writes what the user asked for; text has its own line end.
func (i *Inspection) Print(v fmt.Stringer) error { return cli.Print(i.Output, v) }

// ErrNoProxy is wrapped by errors of questions that no running proxy answers.
var ErrNoProxy = errors.New("no proxy listens")

// Order asks the running proxy for something. The answer is to be closed. The error is ErrNoProxy if there is none.
func (i *Inspection) Order(ctx context.Context, method, what string) (io.ReadCloser, error) {
	socket := i.Flags.Lookup("control-socket").Value.String()
	answer, err := engine.Order(ctx, socket, method, what)
	if engine.Absent(err) {
		do := "start \"fairlead run\""
		if i.offline {
			do += ", or name --manifests"
		}
		err = fmt.Errorf("%w on %s; %s", ErrNoProxy, socket, do)
	}
	return answer, cli.Failed(err)
}

// Text is the running proxy's answer to a question.
func (i *Inspection) Text(ctx context.Context, question string) ([]byte, error) {
	answer, err := i.Order(ctx, http.MethodGet, question)
	if err != nil {
		return nil, err
	}
	defer answer.Close()
	text, err := io.ReadAll(answer)
	return text, cli.Failed(err)
}

// Get decodes the running proxy's answer to a question.
func (i *Inspection) Get(ctx context.Context, question string, to any) error {
	text, err := i.Text(ctx, question)
	if err != nil {
		return err
	}
	return decode(text, to)
}

func decode(text []byte, to any) error {
	if err := json.Unmarshal(text, to); err != nil {
		return cli.Failed(fmt.Errorf("the proxy's answer: %w", err))
	}
	return nil
}

// ErrEnded is the end of an answer that should have had more lines.
var ErrEnded = errors.New("the proxy has ended")

// PrintLines prints the lines of an answer as they come, as they are for output json, and else what text makes of each.
// It ends with the answer, or if text fails or says that a line is the last.
func PrintLines[T any](i *Inspection, answer io.Reader, text func(T) (line string, last bool, err error)) error {
	lines := bufio.NewScanner(answer)
	lines.Buffer(nil, math.MaxInt) // an error may name very many rows
	for lines.Scan() {
		var v T
		if err := decode(lines.Bytes(), &v); err != nil {
			return err
		}
		line, last, err := text(v)
		if i.Output == "json" {
			line = lines.Text()
		}
		if line != "" {
			_, failure := fmt.Println(line)
			err = errors.Join(err, failure)
		}
		if last || err != nil {
			return cli.Failed(err)
		}
	}
	return cli.Failed(errors.Join(ErrEnded, lines.Err()))
}

// StepText is what a person reads of a step, and whether it is the last one.
func StepText(s daemon.SwitchStep) (text string, last bool, err error) {
	switch s.Step {
	case daemon.StepDone, daemon.StepUnchanged:
		return s.Message, true, nil
	case daemon.StepFailed:
		return "", true, errors.New(s.Message)
	}
	return s.Message, false, nil
}
