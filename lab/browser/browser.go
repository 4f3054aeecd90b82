// Package browser starts Chromium for tests of pages.
//
//	Start ─► a browser ─► chromedp.NewContext: a tab ─► steps
//	                                            └─ events ─► Complaint: what a page that works never says
package browser

import (
	"context"
	"fmt"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"

	"fairlead.dev/fairlead/lab/lack"
)

// Step is what a tab does.
type Step = chromedp.Action[chromedp.Void]

// Command is one of the browser's protocol, as a step.
func Command[P, R any](c cdp.Command[P, R], params P) Step {
	return chromedp.Func(func(ctx context.Context, t *chromedp.Target) error {
		_, err := cdp.Call(ctx, t, c, params)
		return err
	})
}

// Start starts a browser that makes no requests by itself, until the end of the test. The test is skipped where there
// is none.
func Start(t testing.TB) context.Context {
	t.Helper()
	const patience = 10 * time.Minute
	options := append(slices.Clone(chromedp.DefaultExecAllocatorOptions[:]),
		chromedp.ExecPath(program(t)), chromedp.NoSandbox, chromedp.DisableGPU, chromedp.UserDataDir(t.TempDir()),
		chromedp.Flag("disable-quic", true), chromedp.Flag("disable-component-update", true))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewExecAllocator(ctx, options...)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewContext(ctx)
	t.Cleanup(cancel)
	if err := chromedp.Do(ctx); err != nil {
		t.Fatal(err)
	}
	return ctx
}

// program is the path of the browser.
func program(t testing.TB) string {
	t.Helper()
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	lack.Skip(t, lack.Chromium, "neither Debian's package chromium nor another one is installed")
	return ""
}

// Complaint is what the console says in an event; empty: it is no such event.
func Complaint(event any) string {
	switch e := event.(type) {
	case *runtime.EventConsoleAPICalled:
		return fmt.Sprintf("console: %s", e.Type)
	case *runtime.EventExceptionThrown:
		return "exception: " + e.ExceptionDetails.Text
	case *log.EventEntryAdded:
		return "log: " + e.Entry.Text
	}
	return ""
}
