package engine

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/windows"

	"fairlead.dev/fairlead/lab/eventually"
)

const inUse = windows.WSAEADDRINUSE

// checkPrivate demands that only administrators and the system can read the file of a socket, and that a question
// without its token, or with another one, has no answer.
func checkPrivate(t *testing.T, socket string) {
	t.Helper()
	access, err := windows.GetNamedSecurityInfo(socket, windows.SE_FILE_OBJECT, windows.DACL_SECURITY_INFORMATION)
	if err != nil {
		t.Fatal(err)
	}
	// Wine has the user in the place of administrators.
	if got := access.String(); strings.Count(got, "(") != 2 || !strings.Contains(got, "(A;;FA;;;SY)") {
		t.Errorf("the access control of %s is %s", socket, got)
	}
	address, authorization, err := readDoor(socket)
	if err != nil {
		t.Fatal(err)
	}
	for value, want := range map[string]int{
		"": http.StatusForbidden, authorization[1:]: http.StatusForbidden, authorization + "A": http.StatusForbidden,
		"Bearer ": http.StatusForbidden, authorization: http.StatusOK,
	} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address+"/status", nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", value)
		response, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(r)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		if response.StatusCode != want {
			t.Errorf("authorization %q: %s, want %d", value, response.Status, want)
		}
	}
}

// TestControl_staleFile: the file of a process that was killed is replaced, or removed.
func TestControl_staleFile(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "control")
	leave := func() {
		t.Helper()
		if err := writePrivately(socket, "127.0.0.1:1\n"+bearer+"X\n"); err != nil {
			t.Fatal(err)
		}
	}
	leave()
	if _, err := Ask(t.Context(), socket, "/status"); !Absent(err) {
		t.Errorf("%v is no absence", err)
	}
	r := newRig(t)
	r.start(func(o *Options) { o.ControlSocket = socket })
	eventually.Nil(t, "the engine answers", func() error {
		_, err := Ask(t.Context(), socket, "/status")
		return err
	})
	if removed, err := RemoveDeadSocket(socket); removed || err != nil {
		t.Errorf("the file of a process that lives: %t, %v", removed, err)
	}
	r.stop()
	leave()
	if removed, err := RemoveDeadSocket(socket); !removed || err != nil {
		t.Errorf("%t, %v", removed, err)
	}
	if err := os.WriteFile(socket, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if removed, err := RemoveDeadSocket(socket); removed || err != nil {
		t.Errorf("a file of others: %t, %v", removed, err)
	}
}
