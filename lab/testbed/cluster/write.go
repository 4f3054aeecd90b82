package cluster

import (
	"fmt"
	"os"
	"path/filepath"

	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/lab/testbed"
)

// Write writes the objects that a service proxy needs into files of a directory, which it makes if
// need be. Each file appears as a whole, the backends before the Services.
func (r *Result) Write(dir string) error {
	err := os.MkdirAll(dir, 0o755)
	for _, file := range []struct {
		name    string
		objects []any
	}{
		{"nodes.yaml", append(anyOf(r.Nodes), anyOf(r.ServiceCIDRs)...)},
		{"endpointslices.yaml", anyOf(r.Slices)},
		{"services.yaml", anyOf(r.Services)},
	} {
		var text, document []byte
		for _, o := range file.objects {
			if err == nil {
				document, err = yaml.Marshal(o)
				text = append(append(text, "---\n"...), document...)
			}
		}
		if err == nil {
			err = testbed.ReplaceFile(filepath.Join(dir, file.name), text, 0o600)
		}
	}
	if err != nil {
		return fmt.Errorf("write cluster: %w", err)
	}
	return nil
}

func anyOf[T any](objects []T) (all []any) {
	for _, o := range objects {
		all = append(all, o)
	}
	return all
}
