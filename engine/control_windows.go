package engine

import (
	"crypto/rand"
	"crypto/subtle"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"unsafe"

	"golang.org/x/sys/windows"
)

// door lets questions in that bring its token. Address and token are in the file that the configuration calls the
// control socket. Windows lets only administrators and the system read that file.
//
//	listen: 127.0.0.1, any port ─► file ─► knock: Authorization: Bearer TOKEN ─► admit
type door struct{ token string }

const bearer = "Bearer "

func newDoor() door { return door{rand.Text()} }

func (d door) authorization() string { return bearer + d.token }

func (d door) admit(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if subtle.ConstantTimeCompare([]byte(r.Header.Get("Authorization")), []byte(d.authorization())) != 1 {
			http.Error(w, "the control file has another token", http.StatusForbidden)
			return
		}
		h.ServeHTTP(w, r)
	})
}

// listen replaces the file of an earlier process: no other one runs.
func (d door) listen(path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	_, _, err := readDoor(path)
	if err == nil {
		err = os.Remove(path)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	if err := writePrivately(path, l.Addr().String()+"\n"+d.authorization()+"\n"); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return announced{l, path}, nil
}

// announced is a listener that takes its file with it.
type announced struct {
	net.Listener
	path string
}

// Close implements net.Listener.
func (a announced) Close() error {
	_ = os.Remove(a.path)
	return a.Listener.Close()
}

// private gives full access to the system and to administrators, and none to others, whatever the directory says.
const private = "D:PAI(A;;FA;;;SY)(A;;FA;;;BA)"

// writePrivately makes a file that has its access control from the beginning.
func writePrivately(path, text string) error {
	access, err := windows.SecurityDescriptorFromString(private)
	if err != nil {
		return err
	}
	attributes := windows.SecurityAttributes{SecurityDescriptor: access}
	attributes.Length = uint32(unsafe.Sizeof(attributes))
	name, err := windows.UTF16PtrFromString(path)
	if err != nil {
		return err
	}
	file, err := windows.CreateFile(name, windows.GENERIC_WRITE, 0, &attributes, windows.CREATE_NEW,
		windows.FILE_ATTRIBUTE_NORMAL, 0)
	if err != nil {
		return &fs.PathError{Op: "create", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(file), path)
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// readDoor reads a file that writePrivately has made, and no other one.
func readDoor(path string) (address, authorization string, err error) {
	text, err := os.ReadFile(path)
	address, authorization, _ = strings.Cut(strings.TrimSpace(string(text)), "\n")
	if err == nil && !strings.HasPrefix(authorization, bearer) {
		err = fmt.Errorf("%s exists and is not a socket's file", path)
	}
	return address, authorization, err
}

// knock puts a question to the process whose address and token are in a file.
func knock(file string, r *http.Request) (*http.Response, error) {
	address, authorization, err := readDoor(file)
	if err != nil {
		return nil, err
	}
	r.URL.Host = address
	r.Header.Set("Authorization", authorization)
	return (&http.Transport{DisableKeepAlives: true}).RoundTrip(r)
}

// Absent reports whether it is for want of a process that listens that Ask or Order has failed.
func Absent(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, windows.WSAECONNREFUSED)
}

// RemoveDeadSocket removes a control file whose process has ended, and reports whether there was one.
func RemoveDeadSocket(path string) (bool, error) {
	address, _, err := readDoor(path)
	if err != nil {
		return false, nil //nolint:nilerr // there is none
	}
	if conn, err := net.Dial("tcp4", address); err == nil {
		return false, conn.Close()
	}
	return true, os.Remove(path)
}

func listenFree(at netip.AddrPort) (net.Listener, error) { return net.Listen("tcp", at.String()) }

// listenShared listens alone: Windows has no sockets that share a port in turns.
func listenShared(at netip.AddrPort) (net.Listener, error) { return net.Listen("tcp", at.String()) }
