package ebpf

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/tools/txtar"

	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/sample"
)

// TestOldKernels has the kernels of older Debians verify the programs and send packets through them, emulated. A run
// draws one cell: what a kernel refuses shows in each program, and what its helpers lack in some tables of packets.
func TestOldKernels(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("qemu-system-x86_64"); err != nil {
		lack.Skip(t, lack.Emulator, err)
	}
	type cell struct{ kernel, tests string }
	var cells []cell
	for _, kernel := range []string{"5.10", "6.1"} {
		cells = append(cells, cell{kernel, "^TestProgram$"})
		for _, some := range groupsOfTables(t, 4) {
			cells = append(cells, cell{kernel, "^TestPackets$/^(" + strings.Join(some, "|") + ")$"})
		}
	}
	drawn := sample.Of(t, len(cells), cells)
	program := filepath.Join(t.TempDir(), "ebpf.test")
	build := exec.Command("go", "test", "-c", "-o", program, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0") // the guest has no libraries
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("compile the tests: %v\n%s", err, out)
	}
	for _, c := range drawn {
		t.Run(c.kernel+" "+c.tests, func(t *testing.T) {
			run := exec.CommandContext(t.Context(), "../../lab/testbed/vm/old", c.kernel, ".", program, "-test.v", "-test.run", c.tests)
			out, err := run.CombinedOutput()
			if err != nil || !bytes.Contains(out, []byte("--- PASS: ")) || bytes.Contains(out, []byte("--- SKIP: ")) {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// groupsOfTables are patterns of the tables of packets, divided among some groups.
func groupsOfTables(t *testing.T, n int) [][]string {
	t.Helper()
	tables, err := txtar.ParseFile("testdata/packets.txtar")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, table := range tables.Files[1:] { // the first one has the rows
		names = append(names, regexp.QuoteMeta(strings.ReplaceAll(table.Name, " ", "_")))
	}
	return slices.Collect(slices.Chunk(names, (len(names)+n-1)/n))
}
