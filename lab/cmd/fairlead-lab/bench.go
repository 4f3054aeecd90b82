package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/runtime"

	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/lab/study"
	studyreport "fairlead.dev/fairlead/lab/study/report"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/cluster"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/programs"
)

// benchmark is a run of experiments.
type benchmark struct {
	quick, full, list bool
	planes, peers     []string
	sizes             []int
	rounds            int
	budget            time.Duration
	resume            string // the directory of a run
	output, format    string
	testKernel        string
	manifests         []string
	kubeconfig, node  string
	fetched           []runtime.Object // of the API server
	guest             string
}

func benchCommand() *cobra.Command {
	var b benchmark
	c := &cobra.Command{
		Use:   "bench [EXPERIMENT...]",
		Short: "compare the data planes on this machine, as published studies did",
		Long: "bench repeats published comparisons of service proxies: each data plane, other proxies if wanted, and\n" +
			"direct access without a proxy, by turns, in network namespaces of their own. Nothing on the machine is changed.\n" +
			"Rounds are added where a comparison is undecided, until all are decided or the time is over: an hour, with\n" +
			"--quick three minutes, with --full three hours, those in a test kernel included. Each turn is kept in a\n" +
			"journal: --continue goes on from there, also after an interruption. It needs root or unprivileged user\n" +
			"namespaces.\n" +
			"Exit status 1: something failed, and the results are without it.",
		Example: "  fairlead bench --quick --output ~/bench\n" +
			"  fairlead bench --continue ~/bench\n" +
			"  fairlead bench connect lookup --planes nftables,ebpf --sizes 100,1000,10000\n" +
			"  fairlead bench --kubeconfig ~/.kube/config\n" +
			"  fairlead bench --peer kube-proxy=/usr/local/bin/kube-proxy --full --output ~/bench\n" +
			"  fairlead bench --list",
		Args: cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, names []string) error {
			if b.resume != "" {
				return b.goOn(c)
			}
			return b.run(c.Context(), names)
		},
	}
	b.addFlagsTo(c.Flags())
	c.AddCommand(benchReportCommand(), benchCompareCommand(), benchFailoverCommand())
	return c
}

func (b *benchmark) addFlagsTo(f *pflag.FlagSet) {
	f.SortFlags = false
	f.BoolVar(&b.list, "list", false, "print what each experiment does, and do nothing")
	f.BoolVar(&b.quick, "quick", false, "what can be decided in three minutes")
	f.BoolVar(&b.full, "full", false, "the largest sizes, in three hours")
	f.DurationVar(&b.budget, "budget", 0, "`time` for which rounds are added (default: 1h, or see --quick and --full)")
	f.StringVar(&b.resume, "continue", "",
		"go on with the run in this `directory`: its command, with another --budget or --rounds")
	f.StringSliceVar(&b.planes, "planes", study.Planes(), "Fairlead's data planes to compare")
	f.StringArrayVar(&b.peers, "peer", nil, "a kube-proxy to compare, in all its modes: `NAME=PATH` (repeatable)")
	f.IntSliceVar(&b.sizes, "sizes", nil,
		"numbers of Services, in experiments in which these grow (default: each has its own)")
	f.IntVar(&b.rounds, "rounds", 0,
		"turns of each contender in each comparison (default: as many as decide)")
	f.StringArrayVar(&b.manifests, "manifests", nil,
		"Services of this `file or directory` instead of generated ones (repeatable)")
	f.StringVar(&b.kubeconfig, "kubeconfig", "", "Services of this API server instead of generated ones; it is only read")
	f.StringVar(&b.node, "hostname-override", "",
		"name of the Node that their local endpoints are on (default: the hostname)")
	f.StringVar(&b.testKernel, "test-kernel", "", "`PATH` of a User-Mode Linux for IPVS, where this kernel has none; "+
		"none: without (default: what ./dev kernel has built)")
	f.StringVar(&b.output, "output", "fairlead-bench", "directory for journal, results and report")
	f.StringVarP(&b.format, "format", "o", "text", "what to print at the end, text or json")
	f.StringVar(&b.guest, strings.TrimPrefix(study.GuestFlag, "--"), "", "")
	_ = f.MarkHidden(strings.TrimPrefix(study.GuestFlag, "--")) // it is there
}

// quickly is the budget of --quick: with the end of all proxies and the reports it is three minutes.
const quickly = 160 * time.Second

// commandArgs are those of this command, without the ones before its name.
func commandArgs() []string {
	return os.Args[slices.Index(os.Args, "bench")+1:]
}

// goOn runs the command that began a run once more, with another budget.
func (b *benchmark) goOn(c *cobra.Command) error {
	args, err := study.Arguments(b.resume)
	if err != nil {
		return cli.Misused(fmt.Errorf("--continue: %w", err))
	}
	again := benchCommand()
	again.SilenceErrors, again.SilenceUsage = true, true
	again.SetArgs(slices.Concat(args, []string{"--quick=false", "--continue=", "--output", b.resume,
		"--budget", b.budget.String(), "--rounds", strconv.Itoa(b.rounds), "--format", b.format}))
	return again.ExecuteContext(c.Context())
}

func (b *benchmark) run(ctx context.Context, names []string) error {
	if b.guest != "" {
		return cli.Failed(study.Guest(ctx, b.guest, studyreport.Needs, os.Stdout))
	}
	o, err := b.options(names)
	if err != nil {
		return cli.Misused(err)
	}
	if b.list {
		return b.printList(o.Experiments)
	}
	if o.Own, err = b.own(ctx); err != nil {
		return cli.Misused(err)
	}
	if status, done, err := b.reexec(); done || err != nil {
		return cli.Exit(status, err)
	}
	agent, err := programs.Find(programs.Agent)
	if err != nil {
		return cli.Misused(fmt.Errorf("bench needs the program that it compares: %w", err))
	}
	o.Program = []string{agent}
	ctx, stop := signal.NotifyContext(ctx, unix.SIGPIPE, unix.SIGHUP) // clean up then, too
	defer stop()
	o.Judge, o.Args = studyreport.Needs, commandArgs()
	line := newProgress()
	o.Progress, o.Say = line.follow, line.say
	r, err := study.Run(ctx, o)
	line.clear()
	if r != nil {
		err = errors.Join(err, b.report(r))
	}
	return b.outcome(ctx, r, err)
}

// outcome is the error that says what has become of a run.
func (b *benchmark) outcome(ctx context.Context, r *study.Result, err error) error {
	switch {
	case ctx.Err() != nil:
		return cli.Exit(cli.ExitInterrupted, fmt.Errorf("interrupted; what was found is in %s: bench --continue %s goes on "+
			"from there", b.output, b.output))
	case err != nil:
		return cli.Failed(err)
	case !r.Complete:
		return cli.Exit(cli.ExitFound, fmt.Errorf("not all of it could be measured: see above, and %s",
			filepath.Join(b.output, "report.md")))
	}
	return nil
}

// options are what the flags say.
func (b *benchmark) options(names []string) (o study.Options, err error) {
	if len(b.sizes) > 0 && (b.kubeconfig != "" || len(b.manifests) > 0) {
		return o, errors.New("--sizes: the Services are those of --kubeconfig or --manifests, however many they are")
	}
	if b.quick && b.full {
		return o, errors.New("--quick and --full exclude each other")
	}
	slices.Sort(b.sizes)
	b.sizes = slices.Compact(b.sizes)
	if b.budget < 0 || b.budget > 0 && b.rounds > 0 {
		return o, errors.New("--budget: a time, and not together with --rounds")
	}
	o = study.Options{Depth: study.Standard, Sizes: b.sizes, Rounds: b.rounds, Dir: b.output, Budget: b.budget}
	if b.full {
		o.Depth = study.Full
	}
	switch {
	case b.budget > 0 || b.rounds > 0:
	case b.quick:
		o.Budget = quickly
	case b.full:
		o.Budget = 3 * time.Hour
	default:
		o.Budget = time.Hour
	}
	if o.Experiments, err = study.Choose(names); err != nil {
		return o, err
	}
	if b.format != "text" && b.format != "json" {
		return o, fmt.Errorf("-o: %q is neither text nor json", b.format)
	}
	if b.rounds < 0 {
		return o, fmt.Errorf("--rounds: %d is not a number of rounds", b.rounds)
	}
	for _, n := range b.sizes {
		if n < 1 || n > study.MostServices {
			return o, fmt.Errorf("--sizes: %d is not between 1 and %d", n, study.MostServices)
		}
	}
	if o.Contenders, err = b.contenders(); err != nil {
		return o, err
	}
	o.TestKernel, err = b.kernel()
	return o, err
}

func (b *benchmark) contenders() ([]study.Contender, error) {
	for i, p := range b.planes {
		if !slices.Contains(study.Planes(), p) {
			return nil, fmt.Errorf("--planes: %q is none of %s", p, strings.Join(study.Planes(), ", "))
		}
		if slices.Contains(b.planes[:i], p) {
			return nil, fmt.Errorf("--planes: %s is there twice", p)
		}
	}
	all := study.Contenders(b.planes)
	seen := map[string]bool{}
	for _, p := range b.peers {
		name, path, ok := strings.Cut(p, "=")
		if !ok || name == "" || path == "" {
			return nil, fmt.Errorf("--peer: %q is not NAME=PATH, as kube-proxy=/usr/local/bin/kube-proxy", p)
		}
		if seen[name] {
			return nil, fmt.Errorf("--peer: the name %s is there twice", name)
		}
		seen[name] = true
		path, err := filepath.Abs(path)
		if err != nil {
			return nil, err
		}
		if err := unix.Access(path, unix.X_OK); err != nil {
			return nil, fmt.Errorf("--peer %s: %s is no program that can be run: %w", name, path, err)
		}
		all = append(all, study.Peers(name, path)...)
	}
	return all, nil
}

// kernel is the test kernel's file; empty: there is none, or it is not wanted.
func (b *benchmark) kernel() (string, error) {
	switch b.testKernel {
	case "none":
		return "", nil
	case "":
		path, err := vm.Find()
		if err != nil {
			return "", nil // a machine without one is nothing unusual
		}
		return path, nil
	}
	if err := unix.Access(b.testKernel, unix.X_OK); err != nil {
		return "", fmt.Errorf("--test-kernel: %s: %w", b.testKernel, err)
	}
	return filepath.Abs(b.testKernel)
}

// own are the user's Services; nil: he has named none.
func (b *benchmark) own(ctx context.Context) (*study.Own, error) {
	if b.node == "" {
		b.node, _ = os.Hostname() // only for endpoints that are local
	}
	switch {
	case b.kubeconfig != "" && len(b.manifests) > 0:
		return nil, errors.New("--kubeconfig and --manifests exclude each other")
	case b.kubeconfig != "":
		var err error
		if b.fetched, err = fetch(ctx, b.kubeconfig); err != nil {
			return nil, fmt.Errorf("--kubeconfig: %w", err)
		}
		return ownOf("the API server of "+b.kubeconfig, b.fetched, b.node)
	case len(b.manifests) > 0:
		files, err := cluster.Load(b.manifests...)
		if err != nil {
			return nil, fmt.Errorf("--manifests: %w", err)
		}
		all, problems := cluster.Objects(files)
		for _, p := range problems {
			fmt.Fprintln(os.Stderr, "problem:", p)
		}
		return ownOf(strings.Join(b.manifests, ", "), all, b.node)
	}
	return nil, nil
}

// fetchedVariable names the file with what an API server has, for the process that Reexec starts: that has no network.
const fetchedVariable = "FAIRLEAD_BENCH_OBJECTS"

// fetch asks an API server, unless that is done.
func fetch(ctx context.Context, kubeconfig string) ([]runtime.Object, error) {
	file := os.Getenv(fetchedVariable)
	if file == "" {
		return kubernetes.ReadServer(ctx, kubeconfig)
	}
	manifests, err := cluster.Load(file)
	if err != nil {
		return nil, err
	}
	objects, problems := cluster.Objects(manifests)
	if len(problems) > 0 {
		return nil, problems[0]
	}
	return objects, nil
}

// reexec is testbed.Reexec; what was fetched is there, too.
func (b *benchmark) reexec() (status int, done bool, err error) {
	if len(b.fetched) == 0 || os.Getenv(fetchedVariable) != "" {
		return testbed.Reexec()
	}
	f, err := os.CreateTemp("", "fairlead-bench-")
	if err != nil {
		return cli.ExitFound, false, err
	}
	defer os.Remove(f.Name())
	for _, o := range b.fetched {
		text, failed := kubernetes.EncodeJSON(o)
		if failed == nil {
			_, failed = fmt.Fprintf(f, "---\n%s\n", text)
		}
		err = errors.Join(err, failed)
	}
	err = errors.Join(err, f.Close(), os.Setenv(fetchedVariable, f.Name()))
	defer os.Unsetenv(fetchedVariable)
	if err != nil {
		return cli.ExitFound, false, err
	}
	return testbed.Reexec()
}

func ownOf(from string, objects []runtime.Object, node string) (*study.Own, error) {
	own, err := study.NewOwn(from, objects, node)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", from, err)
	}
	return own, nil
}

// printList prints what experiments there are.
func (b *benchmark) printList(all []study.Experiment) error {
	if b.format == "json" {
		var list []study.Description
		for _, e := range all {
			list = append(list, e.Description)
		}
		return cli.PrintJSON(list)
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	for _, e := range all {
		fmt.Fprintf(w, "%s\t%s\n", e.Name, e.Does)
	}
	return w.Flush()
}

// report writes the reports, and prints one.
func (b *benchmark) report(r *study.Result) error {
	if len(r.Rows) == 0 {
		return nil
	}
	failed := writeReports(r, b.output) // what can be printed is, all the same
	if b.format == "json" {
		return errors.Join(failed, cli.PrintJSON(r))
	}
	err := errors.Join(failed, studyreport.Text(os.Stdout, r))
	if failed != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "fairlead: %s has it with charts; report.md and result.json are beside it\n",
		filepath.Join(b.output, "report.html"))
	return err
}
