package kubernetes

import (
	"cmp"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"path/filepath"
	"time"

	certutil "k8s.io/client-go/util/cert"

	"fairlead.dev/fairlead/lab/testbed"
)

// authority is the cluster's certificate authority.
type authority struct {
	dir   string
	cert  *x509.Certificate
	key   crypto.Signer
	caPEM []byte
}

// certLife is how long certificates last whose User does not say so.
const certLife = 24 * time.Hour

// newAuthority makes the authority and, in dir, the files of the API server: ca.crt, serving.crt,
// serving.key and service-account.key.
func newAuthority(dir string, serving []netip.Addr) (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	cert, err := certutil.NewSelfSignedCACert(certutil.Config{CommonName: "fairlead testbed"}, key)
	if err != nil {
		return nil, err
	}
	a := &authority{dir: dir, cert: cert, key: key, caPEM: pemBlock("CERTIFICATE", cert.Raw)}
	if err := a.write("ca.crt", a.caPEM); err != nil {
		return nil, err
	}
	_, accounts, err := newKey()
	if err != nil {
		return nil, err
	}
	if err := a.write(serviceAccountKey, accounts); err != nil {
		return nil, err
	}
	return a, a.writeServing(serving)
}

// writeServing gives the API server a new certificate.
func (a *authority) writeServing(addrs []netip.Addr) error {
	template := newTemplate("kube-apiserver", nil, certLife)
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	template.DNSNames = []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"}
	for _, addr := range addrs {
		template.IPAddresses = append(template.IPAddresses, net.IP(addr.AsSlice()))
	}
	cert, key, err := a.issue(template)
	if err != nil {
		return err
	}
	if err := a.write("serving.key", key); err != nil {
		return err
	}
	return a.write("serving.crt", cert)
}

// user issues a client's certificate.
func (a *authority) user(u User) (cert, key []byte, err error) {
	template := newTemplate(u.Name, u.Groups, cmp.Or(u.Life, certLife))
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	return a.issue(template)
}

func (a *authority) issue(template *x509.Certificate) (cert, key []byte, err error) {
	private, keyPEM, err := newKey()
	if err != nil {
		return nil, nil, err
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, private.Public(), a.key)
	if err != nil {
		return nil, nil, fmt.Errorf("issue a certificate for %s: %w", template.Subject, err)
	}
	return pemBlock("CERTIFICATE", der), keyPEM, nil
}

// write replaces a file at once, for the API server reloads its certificate when it changes.
func (a *authority) write(name string, data []byte) error {
	return testbed.ReplaceFile(filepath.Join(a.dir, name), data, 0o600)
}

func newTemplate(name string, groups []string, life time.Duration) *x509.Certificate {
	serial, _ := rand.Int(rand.Reader, big.NewInt(1<<62)) // cannot fail
	now := time.Now()
	return &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: name, Organization: groups},
		NotBefore:    now.Add(-time.Minute),
		NotAfter:     now.Add(life),
		KeyUsage:     x509.KeyUsageDigitalSignature,
	}
}

func newKey() (*ecdsa.PrivateKey, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	der, err := x509.MarshalECPrivateKey(key)
	return key, pemBlock("EC PRIVATE KEY", der), err
}

func pemBlock(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

// servingAddrs are those by which clients know the API server: of the host, of relays, and the first of
// each Service range, which is that of the Service "kubernetes".
func servingAddrs() []netip.Addr {
	addrs := []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}
	for _, v6 := range []bool{false, true} {
		addrs = append(addrs, relayAddr(v6).Addr())
	}
	for _, p := range testbed.ServiceCIDRs() {
		addrs = append(addrs, p.Addr().Next())
	}
	return addrs
}
