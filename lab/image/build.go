package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// registry is in front of the images' names in archives; an image that is pushed elsewhere gets another name.
const registry = "fairlead.dev/"

// programs are the binaries for one architecture.
type programs struct {
	arch string
	dir  string
}

func parsePrograms(arg string) (programs, error) {
	arch, dir, ok := strings.Cut(arg, "=")
	if !ok || !slices.Contains(architectures(), arch) {
		return programs{}, fmt.Errorf("%q is not ARCHITECTURE=DIR with one of %s",
			arg, strings.Join(architectures(), ", "))
	}
	return programs{arch, dir}, nil
}

// content is what makes one image different from another.
type content struct {
	name        string // of the repository
	description string
	command     []string // the default of the image
	layers      func(*builder, programs) ([]tree, error)
}

// agentImage serves a node.
func agentImage() content {
	return content{
		name:        "fairlead",
		description: "Makes Kubernetes Services work on a Linux node, in kube-proxy's place",
		command:     []string{"run"},
		layers: func(b *builder, p programs) ([]tree, error) {
			agent, err := b.agentTree(p)
			return []tree{agent}, err
		},
	}
}

// labImage has the agent, too, which the laboratory runs in its virtual clusters. Without a command it says which
// ones there are: it does not begin to serve the node.
func labImage(debian func(arch string) (tree, error)) content {
	return content{
		name:        "fairlead-lab",
		description: "Measures and demonstrates service proxies in virtual clusters, with Fairlead's agent",
		layers: func(b *builder, p programs) ([]tree, error) {
			tools, err := debian(p.arch)
			if err != nil {
				return nil, err
			}
			agent, err := b.agentTree(p)
			if err != nil {
				return nil, err
			}
			lab := tree{}
			return []tree{tools, agent, lab}, errors.Join(lab.addProgram(p, "fairlead-lab"), lab.addProgram(p, "fairlead-cases"))
		},
	}
}

// builder makes an image.
type builder struct {
	programs []programs
	version  string
	revision string
	created  int64
	licence  string
	out      string
}

func (b *builder) build(c content) error {
	index := newIndex()
	for _, p := range b.programs {
		layers, err := c.layers(b, p)
		if err != nil {
			return err
		}
		image, err := b.image(c, p.arch, layers)
		if err != nil {
			return err
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add:        image,
			Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: p.arch}},
		})
	}
	return b.write(registry+c.name, index)
}

// tag is the version without what a tag cannot hold.
func (b *builder) tag() string { return strings.ReplaceAll(b.version, "+", "-") }

// agentTree is the agent where kubeadm's DaemonSet looks for kube-proxy, and under its own name.
func (b *builder) agentTree(p programs) (tree, error) {
	licence, err := os.ReadFile(b.licence)
	if err != nil {
		return nil, err
	}
	t := tree{}
	t.addLink("usr/local/bin/kube-proxy", "fairlead")
	t.addFile("usr/share/doc/fairlead/copyright", 0o644, licence)
	return t, t.addProgram(p, "fairlead")
}

// addProgram adds one of the programs for an architecture.
func (t tree) addProgram(p programs, name string) error {
	binary, err := os.ReadFile(filepath.Join(p.dir, name))
	t.addFile("usr/local/bin/"+name, 0o755, binary)
	return err
}

func newIndex() v1.ImageIndex { return mutate.IndexMediaType(empty.Index, types.OCIImageIndex) }

func (b *builder) image(c content, arch string, trees []tree) (v1.Image, error) {
	created := v1.Time{Time: time.Unix(b.created, 0).UTC()}
	image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	for _, t := range trees {
		layer, err := newLayer(t)
		if err != nil {
			return nil, err
		}
		history := v1.History{Created: created, CreatedBy: "fairlead's lab/image"}
		image, err = mutate.Append(image, mutate.Addendum{Layer: layer, History: history, MediaType: types.OCILayer})
		if err != nil {
			return nil, err
		}
	}
	config, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture, config.Created = "linux", arch, created
	config.Config = b.config(c)
	return mutate.ConfigFile(image, config)
}

// config says how to run the image.
func (b *builder) config(c content) v1.Config {
	return v1.Config{
		Entrypoint: []string{"/usr/local/bin/fairlead"}, // it has the commands of the laboratory, too
		Cmd:        c.command,
		Env:        []string{"PATH=/usr/local/bin:/usr/sbin:/usr/bin"},
		User:       "0:0", // the kernel's rules belong to root; capabilities are what limits it
		Labels: map[string]string{
			"org.opencontainers.image.title":       c.name,
			"org.opencontainers.image.description": c.description,
			"org.opencontainers.image.licenses":    "Apache-2.0",
			"org.opencontainers.image.version":     b.version,
			"org.opencontainers.image.revision":    b.revision,
		},
	}
}

func newLayer(t tree) (v1.Layer, error) {
	archive, err := t.archive()
	if err != nil {
		return nil, err
	}
	open := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(archive)), nil }
	return tarball.LayerFromOpener(open, tarball.WithMediaType(types.OCILayer))
}

// write writes the layout anew, and the archive of it.
func (b *builder) write(repository string, image v1.ImageIndex) error {
	if err := os.RemoveAll(b.out); err != nil {
		return err
	}
	path, err := layout.Write(b.out, newIndex())
	if err != nil {
		return err
	}
	digest, err := image.Digest()
	if err != nil {
		return err
	}
	names := map[string]string{
		"org.opencontainers.image.ref.name": b.tag(),
		"io.containerd.image.name":          repository + ":" + b.tag(), // what "ctr images import" calls it
	}
	if err := path.AppendIndex(image, layout.WithAnnotations(names)); err != nil {
		return err
	}
	fmt.Printf("%s:%s@%s\n", repository, b.tag(), digest)
	return archiveLayout(b.out, b.out+".tar")
}

// archiveLayout writes the directory as an OCI archive.
func archiveLayout(dir, name string) error {
	t := tree{}
	if err := t.addFS(os.DirFS(dir)); err != nil {
		return err
	}
	archive, err := t.archive()
	if err != nil {
		return err
	}
	return os.WriteFile(name, archive, 0o644)
}
