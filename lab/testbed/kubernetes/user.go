package kubernetes

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"fairlead.dev/fairlead/lab/testbed"
)

// User is a client's identity: by a certificate, or, for system:serviceaccount:NAMESPACE:NAME,
// by a token of that account, which is made if it does not exist.
type User struct {
	Name   string
	Groups []string
	Life   time.Duration // of the certificate or token (at least 10 minutes); 0: a day
}

// Admin may do everything.
func Admin() User { return User{Name: "admin", Groups: []string{"system:masters"}} }

// KubeProxy has the rights of the ClusterRole system:node-proxier and no others.
func KubeProxy() User { return User{Name: "system:kube-proxy"} }

// serviceAccount splits the name of a service account's user.
func (u User) serviceAccount() (namespace, name string, ok bool) {
	rest, ok := strings.CutPrefix(u.Name, "system:serviceaccount:")
	if !ok {
		return "", "", false
	}
	return strings.Cut(rest, ":")
}

// configFor is a client's configuration outside of all beds, by certificate.
func (c *ControlPlane) configFor(u User) (*rest.Config, error) {
	cert, key, err := c.authority.user(u)
	if err != nil {
		return nil, err
	}
	return &rest.Config{
		Host:      c.hostURL(),
		UserAgent: "fairlead-testbed",
		// Tests write deprecated fields on purpose.
		WarningHandler: rest.NoWarnings{},
		TLSClientConfig: rest.TLSClientConfig{
			CAData: c.authority.caPEM, CertData: cert, KeyData: key,
		},
	}, nil
}

// Kubeconfig writes a kubeconfig for programs in the namespace of this process, as kubectl, and returns
// its name. Programs in a Bed need Relay.Kubeconfig.
func (c *ControlPlane) Kubeconfig(dir string, u User) (string, error) {
	path := filepath.Join(dir, kubeconfigName(u))
	return path, c.writeKubeconfig(path, c.hostURL(), u)
}

// Kubectl runs kubectl as administrator with a text as its standard input, and returns what it says.
func (c *ControlPlane) Kubectl(ctx context.Context, stdin string, args ...string) (string, error) {
	args = append([]string{"--kubeconfig=" + c.path(kubeconfigName(Admin()))}, args...)
	cmd := exec.CommandContext(ctx, c.parts.Path("kubectl"), args...)
	cmd.Stdin = strings.NewReader(stdin)
	cmd.Env = append(os.Environ(), "HOME="+c.dir.path) // where it caches what the API has
	out, err := cmd.CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("kubectl %s: %w", strings.Join(args, " "), err)
	}
	return string(out), nil
}

func kubeconfigName(u User) string { return strings.ReplaceAll(u.Name, ":", "-") + ".kubeconfig" }

func (c *ControlPlane) writeKubeconfig(path, server string, u User) error {
	auth := clientcmdapi.NewAuthInfo()
	if namespace, name, ok := u.serviceAccount(); ok {
		// A file of its own, as in a pod: clients read it again when it changes.
		auth.TokenFile = path + ".token"
		if err := c.writeToken(auth.TokenFile, namespace, name, u.Life); err != nil {
			return err
		}
	} else {
		cert, key, err := c.authority.user(u)
		if err != nil {
			return err
		}
		auth.ClientCertificateData, auth.ClientKeyData = cert, key
	}
	cluster := clientcmdapi.NewCluster()
	cluster.Server, cluster.CertificateAuthorityData = server, c.authority.caPEM
	current := clientcmdapi.NewContext()
	current.Cluster, current.AuthInfo = "testbed", u.Name
	config := clientcmdapi.NewConfig()
	config.Clusters["testbed"], config.AuthInfos[u.Name], config.Contexts["testbed"] = cluster, auth, current
	config.CurrentContext = "testbed"
	return clientcmd.WriteToFile(*config, path)
}

// writeToken replaces the token in a file by a new one.
func (c *ControlPlane) writeToken(path, namespace, name string, life time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), startPatience)
	defer cancel()
	accounts := c.client.CoreV1().ServiceAccounts(namespace)
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace}}
	if _, err := accounts.Create(ctx, account, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("make service account %s/%s: %w", namespace, name, err)
	}
	seconds := new(int64(cmp.Or(life, certLife) / time.Second))
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: seconds}}
	token, err := accounts.CreateToken(ctx, name, request, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("make a token of service account %s/%s: %w", namespace, name, err)
	}
	return testbed.ReplaceFile(path, []byte(token.Status.Token), 0o600)
}
