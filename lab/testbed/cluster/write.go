package cluster

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"

	"sigs.k8s.io/yaml"
)

// Write writes the objects that a service proxy needs into files of a directory, which it makes if
// need be. Each file appears as a whole, the backends before the Services.
func (r *Result) Write(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("write cluster: %w", err)
	}
	nodes, err := documents(r.Nodes)
	if err != nil {
		return err
	}
	cidrs, err := documents(r.ServiceCIDRs)
	if err != nil {
		return err
	}
	endpoints, err := documents(r.Slices)
	if err != nil {
		return err
	}
	services, err := documents(r.Services)
	if err != nil {
		return err
	}
	for _, file := range []struct {
		name string
		data []byte
	}{{"nodes.yaml", append(nodes, cidrs...)}, {"endpointslices.yaml", endpoints}, {"services.yaml", services}} {
		if err := replaceFile(filepath.Join(dir, file.name), file.data); err != nil {
			return fmt.Errorf("write cluster: %w", err)
		}
	}
	return nil
}

// documents is a YAML document for each object.
func documents[T any](objects []T) ([]byte, error) {
	var out bytes.Buffer
	for _, o := range objects {
		data, err := yaml.Marshal(o)
		if err != nil {
			return nil, fmt.Errorf("write cluster: %w", err)
		}
		out.WriteString("---\n")
		out.Write(data)
	}
	return out.Bytes(), nil
}

// replaceFile never shows a reader half a file.
func replaceFile(name string, data []byte) error {
	temporary, err := os.CreateTemp(filepath.Dir(name), ".*.tmp")
	if err != nil {
		return err
	}
	_, err = temporary.Write(data)
	if closed := temporary.Close(); err == nil {
		err = closed
	}
	if err == nil {
		err = os.Rename(temporary.Name(), name)
	}
	if err != nil {
		_ = os.Remove(temporary.Name()) // the first error is the one to report
	}
	return err
}
