package kube

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/transport"
)

// hole forwards connections until it swallows everything that is sent through it. Later connections are forwarded
// again.
type hole struct {
	net.Listener
	to string

	mu    sync.Mutex
	dead  *atomic.Bool // of the connections since the last swallowing
	conns []net.Conn
}

func newHole(t *testing.T, to string) *hole {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h := &hole{Listener: l, to: to, dead: &atomic.Bool{}}
	go h.serve()
	t.Cleanup(func() {
		l.Close()
		h.mu.Lock()
		defer h.mu.Unlock()
		for _, c := range h.conns {
			c.Close()
		}
	})
	return h
}

func (h *hole) serve() {
	for {
		in, err := h.Accept()
		if err != nil {
			return
		}
		out, err := net.Dial("tcp", h.to)
		if err != nil {
			in.Close()
			continue
		}
		h.mu.Lock()
		h.conns = append(h.conns, in, out)
		dead := h.dead
		h.mu.Unlock()
		go forward(in, out, dead)
		go forward(out, in, dead)
	}
}

func forward(to, from net.Conn, dead *atomic.Bool) {
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		if dead.Load() {
			if err != nil {
				return
			}
			continue
		}
		if n > 0 {
			if _, err := to.Write(buffer[:n]); err != nil {
				from.Close()
			}
		}
		if err != nil {
			to.Close()
			return
		}
	}
}

// swallow leaves present connections open, and nothing comes through.
func (h *hole) swallow() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.dead.Store(true)
	h.dead = &atomic.Bool{}
}

// A silent connection that is not closed is noticed by HTTP/2's pings; client-go's are sent after 30 s of silence, and
// waited for 15 s.
func TestSource_blackHole(t *testing.T) {
	t.Setenv("HTTP2_READ_IDLE_TIMEOUT_SECONDS", "1")
	t.Setenv("HTTP2_PING_TIMEOUT_SECONDS", "1")
	server := cluster(t)
	h := newHole(t, server.Listener.Addr().String())
	c := connect(t, ClientOptions{Kubeconfig: server.kubeconfig("https://"+h.Addr().String(), &api.AuthInfo{})})
	s := open(t, c)
	expect(t, s, wholeCluster)
	server.watched()
	h.swallow()
	server.put(aService("web", "10.96.0.5"))
	expect(t, s, "service default/web [10.96.0.5]")
}

// authority issues client certificates.
type authority struct {
	t    *testing.T
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
}

func newAuthority(t *testing.T) *authority {
	a := &authority{t: t}
	a.cert, a.key = a.issue(&x509.Certificate{
		IsCA: true, BasicConstraintsValid: true, Subject: pkix.Name{CommonName: "ca"},
		NotAfter: time.Now().Add(time.Hour),
	})
	return a
}

func (a *authority) issue(template *x509.Certificate) (*x509.Certificate, *ecdsa.PrivateKey) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	parent, signer := template, key
	if a.cert != nil {
		parent, signer = a.cert, a.key
	}
	text, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		a.t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(text)
	if err != nil {
		a.t.Fatal(err)
	}
	return cert, key
}

// write writes a certificate of a user.
func (a *authority) write(user, certFile, keyFile string) {
	cert, key := a.issue(&x509.Certificate{
		Subject:  pkix.Name{CommonName: user},
		NotAfter: time.Now().Add(time.Hour), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
	text, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	for file, block := range map[string]*pem.Block{
		keyFile: {Type: "EC PRIVATE KEY", Bytes: text}, certFile: {Type: "CERTIFICATE", Bytes: cert.Raw},
	} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			a.t.Fatal(err)
		}
	}
}

// Client certificates are renewed in place. client-go looks for new ones every five minutes.
func TestSource_certificateIsReadAgain(t *testing.T) {
	old := transport.CertCallbackRefreshDuration
	transport.CertCallbackRefreshDuration = 50 * time.Millisecond
	t.Cleanup(func() { transport.CertCallbackRefreshDuration = old })
	logs, log := newLogbook()
	ca := newAuthority(t)
	server := cluster(t)
	server.TLS.ClientAuth = tls.RequestClientCert
	var valid atomic.Value
	valid.Store("one")
	server.setFault(func(w http.ResponseWriter, r *http.Request) bool {
		if p := r.TLS.PeerCertificates; len(p) == 1 && p[0].Subject.CommonName == valid.Load().(string) {
			return false
		}
		refuse(w, http.StatusUnauthorized, metav1.StatusReasonUnauthorized)
		return true
	})
	user := &api.AuthInfo{
		ClientCertificate: filepath.Join(t.TempDir(), "tls.crt"), ClientKey: filepath.Join(t.TempDir(), "tls.key"),
	}
	ca.write("one", user.ClientCertificate, user.ClientKey)
	s := open(t, connect(t, ClientOptions{Kubeconfig: server.kubeconfig(server.URL, user), Log: log}))
	expect(t, s, wholeCluster)
	valid.Store("two")
	server.endWatches()
	logs.await(t, "does not accept the credentials")
	ca.write("two", user.ClientCertificate, user.ClientKey)
	server.put(aService("web", "10.96.0.5"))
	expect(t, s, "service default/web [10.96.0.5]")
	logs.await(t, "serves again")
}
