package plugin

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"regexp"
	"runtime"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/programs"
	"fairlead.dev/fairlead/version"
)

func reportCommand() *cobra.Command {
	var i inspection
	var file string
	var hide bool
	c := &cobra.Command{
		Use:   "report",
		Short: "make one archive for a bug report: status, rows, counters, the last ten minutes, and the system",
		Long: "report writes what a bug report needs into one archive (.tar.gz): status, rows, counters, an audit and the\n" +
			"configuration. It adds the events of the last ten minutes with the lines of the log, and the kernel's version\n" +
			"and modules. It takes no file that has secrets: none of the kubeconfig but its path. Names of objects and\n" +
			"nodes stay. If no proxy runs, the archive has the rest and says what is missing.",
		Example: "  fairlead report --without-addresses\n" +
			"  kubectl -n kube-system exec POD -- fairlead report -o - >report.tar.gz",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return i.report(c.Context(), file, hide) },
	}
	c.Flags().SortFlags = false
	c.Flags().StringVarP(&file, "output", "o", "", "the archive; -: the standard output (default: a name with the time)")
	c.Flags().BoolVar(&hide, "without-addresses", false,
		"write addr-1, addr-2, … for addresses of IP, the same for the same address, loopback excepted")
	i.AddSocketTo(c.Flags())
	return c
}

// questions are what the running proxy is asked, by the files that have the answers. The audit is last: it repairs.
func questions() [][2]string {
	return [][2]string{
		{"events.json", "/events"}, {"status.json", "/status"}, {"configuration.json", "/configz"}, {"rows.txt", "/dump"},
		{"counters.txt", "/counters"}, {"audit.json", "/audit"},
	}
}

// patience is how long each answer may take.
const patience = time.Minute

// report leaves no file behind if it fails or is interrupted.
func (i *inspection) report(ctx context.Context, path string, hide bool) (err error) {
	now := time.Now().UTC()
	if path == "" {
		path = now.Format("fairlead-report-20060102T150405Z.tar.gz")
	}
	out := os.Stdout
	if path != "-" {
		if out, err = os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
			return cli.Misused(err)
		}
		defer func() {
			if err = errors.Join(err, out.Close()); err != nil {
				err = errors.Join(err, os.Remove(path))
			}
		}()
	}
	lacking, err := i.archive(ctx, out, now, hide)
	if err = errors.Join(err, ctx.Err()); err != nil {
		return cli.Failed(err)
	}
	for _, l := range lacking {
		fmt.Fprintln(os.Stderr, "fairlead: the archive lacks", l)
	}
	if path != "-" {
		fmt.Println(path)
	}
	return nil
}

// archive writes the files, and returns what could not be had.
func (i *inspection) archive(
	ctx context.Context, out io.Writer, now time.Time, hide bool,
) (lacking []string, err error) {
	zipped := gzip.NewWriter(out)
	files := tar.NewWriter(zipped)
	var hidden addresses
	if hide {
		hidden = addresses{}
	}
	add := func(name string, text []byte, failure error) {
		if failure != nil {
			lacking = append(lacking, name+": "+failure.Error())
			return
		}
		text = hidden.replace(text)
		header := &tar.Header{Name: "fairlead-report/" + name, Mode: 0o600, Size: int64(len(text)), ModTime: now}
		if err = errors.Join(err, files.WriteHeader(header)); err == nil {
			_, err = files.Write(text)
		}
	}
	for _, q := range questions() {
		limited, cancel := context.WithTimeout(ctx, patience)
		answer, err := i.Text(limited, q[1])
		cancel()
		add(q[0], answer, err)
	}
	if runtime.GOOS == "linux" {
		for name, file := range map[string]string{"kernel.txt": "/proc/version", "modules.txt": "/proc/modules"} {
			text, err := os.ReadFile(file)
			add(name, text, err)
		}
	}
	add("about.txt", []byte(about(now, lacking)), nil)
	return lacking, errors.Join(err, files.Close(), zipped.Close())
}

// about is the file that says what the archive is.
func about(now time.Time, lacking []string) string {
	text := version.Line(programs.Agent) + "\n" + now.Format(time.RFC3339) + "\n" +
		"events.json has what happened in the last ten minutes, lines of the log included.\n"
	for _, l := range lacking {
		text += "lacking: " + l + "\n"
	}
	return text
}

// addresses replaces addresses of IP by names; nil leaves them.
type addresses map[netip.Addr]string

// addressLike are words that may be, or have, an address, as 10.0.0.1, fd00::1, and ip-10-0-0-1 in the name of a node.
func addressLike() *regexp.Regexp {
	return regexp.MustCompile(`[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*|` +
		`[0-9]{1,3}(\.[0-9]{1,3}){3}|\b[0-9]{1,3}(-[0-9]{1,3}){3}\b`)
}

func (a addresses) replace(text []byte) []byte {
	if a == nil {
		return text
	}
	return addressLike().ReplaceAllFunc(text, func(word []byte) []byte {
		if strings.Contains(string(word), ":") {
			return []byte(a.colons(string(word)))
		}
		if ip, err := netip.ParseAddr(strings.ReplaceAll(string(word), "-", ".")); err == nil {
			return []byte(a.name(ip, string(word)))
		}
		return word
	})
}

// colons replaces an address of IPv6 that may have a colon or a full stop before or after it.
func (a addresses) colons(word string) string {
	const most = 2
	for before := 0; before <= min(most, len(word)); before++ {
		for after := 0; after <= min(most, len(word)-before); after++ {
			end := len(word) - after
			if strings.Trim(word[:before]+word[end:], ":.") != "" {
				break
			}
			if ip, err := netip.ParseAddr(word[before:end]); err == nil {
				return word[:before] + a.name(ip, word[before:end]) + word[end:]
			}
		}
	}
	return word
}

// name is that of an address, or the text itself, if it says nothing of the network.
func (a addresses) name(ip netip.Addr, text string) string {
	ip = ip.Unmap()
	if ip.IsLoopback() || ip.IsUnspecified() {
		return text
	}
	if a[ip] == "" {
		a[ip] = fmt.Sprintf("addr-%d", len(a)+1)
	}
	return a[ip]
}
