package config

import (
	"fmt"
	"os"

	"sigs.k8s.io/yaml"
)

// WriteKubeProxy writes the effective KubeProxyConfiguration to a file that kube-proxy accepts too.
func (c *Config) WriteKubeProxy(path string) error {
	text, err := c.Document(KubeProxyKind)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path, text, 0o644); err != nil {
		return fmt.Errorf("--write-config-to: %w", err)
	}
	return nil
}

// Document is the effective configuration of one kind, KubeProxyConfiguration or FairleadConfiguration,
// as YAML.
func (c *Config) Document(kind string) ([]byte, error) {
	switch kind {
	case KubeProxyKind:
		out := c.KubeProxy
		out.TypeMeta = kubeProxyTypeMeta()
		return yaml.Marshal(out)
	case FairleadKind:
		return yaml.Marshal(c.Fairlead)
	}
	return nil, fmt.Errorf("there is no kind %q", kind)
}
