package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
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

// repository is the image's name in archives; who pushes it elsewhere gives it another.
const repository = "fairlead.dev/fairlead"

// program is the binary for one architecture.
type program struct {
	arch string
	file string
}

func parseProgram(arg string) (program, error) {
	arch, file, ok := strings.Cut(arg, "=")
	if !ok || !slices.Contains(architectures(), arch) {
		return program{}, fmt.Errorf("%q is not ARCHITECTURE=PROGRAM with one of %s",
			arg, strings.Join(architectures(), ", "))
	}
	return program{arch, file}, nil
}

// builder makes the image in its variants.
type builder struct {
	lock     lock
	programs []program
	version  string
	revision string
	created  int64
	licence  string
	out      string
	cache    string
}

func (b *builder) build(ctx context.Context) error {
	full, static := newIndex(), newIndex()
	fetcher, err := newFetcher(ctx, b.cache, b.lock.Snapshot)
	if err != nil {
		return err
	}
	for _, p := range b.programs {
		debian, err := debianTree(ctx, fetcher, b.lock.Files[p.arch])
		if err != nil {
			return err
		}
		own, err := b.programTree(p)
		if err != nil {
			return err
		}
		if full, err = b.append(full, p.arch, debian, own); err != nil {
			return err
		}
		if static, err = b.append(static, p.arch, own); err != nil {
			return err
		}
	}
	return b.write(map[string]v1.ImageIndex{b.tag(): full, b.tag() + "-static": static})
}

// tag is the version without what a tag cannot hold.
func (b *builder) tag() string { return strings.ReplaceAll(b.version, "+", "-") }

// programTree is the program where kubeadm's DaemonSet looks for kube-proxy, and under its own name.
func (b *builder) programTree(p program) (tree, error) {
	binary, err := os.ReadFile(p.file)
	if err != nil {
		return nil, err
	}
	licence, err := os.ReadFile(b.licence)
	if err != nil {
		return nil, err
	}
	t := tree{}
	t.addFile("usr/local/bin/fairlead", 0o755, binary)
	t.addLink("usr/local/bin/kube-proxy", "fairlead")
	t.addFile("usr/share/doc/fairlead/copyright", 0o644, licence)
	return t, nil
}

func newIndex() v1.ImageIndex { return mutate.IndexMediaType(empty.Index, types.OCIImageIndex) }

// append adds an image of these layers to an index.
func (b *builder) append(to v1.ImageIndex, arch string, trees ...tree) (v1.ImageIndex, error) {
	image, err := b.image(arch, trees)
	if err != nil {
		return nil, err
	}
	return mutate.AppendManifests(to, mutate.IndexAddendum{
		Add:        image,
		Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}},
	}), nil
}

func (b *builder) image(arch string, trees []tree) (v1.Image, error) {
	created := v1.Time{Time: time.Unix(b.created, 0).UTC()}
	image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	for _, t := range trees {
		layer, err := newLayer(t)
		if err != nil {
			return nil, err
		}
		history := v1.History{Created: created, CreatedBy: "fairlead's deploy/image"}
		image, err = mutate.Append(image, mutate.Addendum{Layer: layer, History: history, MediaType: types.OCILayer})
		if err != nil {
			return nil, err
		}
	}
	return mutate.ConfigFile(image, b.config(image, arch, created))
}

// config keeps what the layers have made of the image's configuration, and adds how to run it.
func (b *builder) config(image v1.Image, arch string, created v1.Time) *v1.ConfigFile {
	config, err := image.ConfigFile()
	if err != nil { // of an image in memory it cannot fail
		config = &v1.ConfigFile{}
	}
	config = config.DeepCopy()
	config.OS, config.Architecture, config.Created = "linux", arch, created
	config.Config = v1.Config{
		Entrypoint: []string{"/usr/local/bin/fairlead"},
		Cmd:        []string{"run"},
		Env:        []string{"PATH=/usr/local/bin:/usr/sbin:/usr/bin"},
		User:       "0:0", // the kernel's rules belong to root; capabilities are what limits it
		Labels: map[string]string{
			"org.opencontainers.image.title":       "fairlead",
			"org.opencontainers.image.description": "Makes Kubernetes Services work on a Linux node, in kube-proxy's place",
			"org.opencontainers.image.licenses":    "Apache-2.0",
			"org.opencontainers.image.version":     b.version,
			"org.opencontainers.image.revision":    b.revision,
		},
	}
	return config
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
func (b *builder) write(images map[string]v1.ImageIndex) error {
	if err := os.RemoveAll(b.out); err != nil {
		return err
	}
	path, err := layout.Write(b.out, newIndex())
	if err != nil {
		return err
	}
	for _, tag := range []string{b.tag(), b.tag() + "-static"} {
		digest, err := images[tag].Digest()
		if err != nil {
			return err
		}
		names := map[string]string{
			"org.opencontainers.image.ref.name": tag,
			"io.containerd.image.name":          repository + ":" + tag, // what "ctr images import" calls it
		}
		if err := path.AppendIndex(images[tag], layout.WithAnnotations(names)); err != nil {
			return err
		}
		fmt.Printf("%s:%s@%s\n", repository, tag, digest)
	}
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
