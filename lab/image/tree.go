package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"time"
)

// tree is a file system to be: entries by their path, without a slash in front.
type tree map[string]entry

type entry struct {
	header  tar.Header
	content []byte
}

// add puts an entry into the tree, reduced to what shall make a difference between two images: no
// times, no owner but root.
func (t tree) add(h tar.Header, content []byte) {
	name := strings.Trim(path.Clean("/"+h.Name), "/")
	if name == "" {
		return
	}
	t[name] = entry{tar.Header{
		Typeflag: h.Typeflag, Name: name, Linkname: h.Linkname, Mode: h.Mode, Size: int64(len(content)),
		ModTime: time.Unix(0, 0), Format: tar.FormatPAX,
	}, content}
}

func (t tree) addFile(name string, mode int64, content []byte) {
	t.add(tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode}, content)
}

func (t tree) addLink(name, target string) {
	t.add(tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777}, nil)
}

// addTar adds those entries of an archive that keep wants, with the directories that lead to them.
func (t tree) addTar(archive []byte, keep func(name string) bool) error {
	reader := tar.NewReader(bytes.NewReader(archive))
	for {
		h, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if !keep(path.Clean("/" + h.Name)) {
			continue
		}
		if h.Typeflag == tar.TypeLink {
			return fmt.Errorf("%s is a hard link, which this program does not handle", h.Name)
		}
		content, err := io.ReadAll(reader)
		if err != nil {
			return err
		}
		t.add(*h, content)
	}
}

// write writes the tree as an archive, sorted, so that directories come before what is in them.
func (t tree) write(w io.Writer) error {
	t.completeDirectories()
	archive := tar.NewWriter(w)
	for _, name := range slices.Sorted(maps.Keys(t)) {
		e := t[name]
		if err := archive.WriteHeader(&e.header); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if _, err := archive.Write(e.content); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return archive.Close()
}

// addFS adds all files of a file system.
func (t tree) addFS(files fs.FS) error {
	return fs.WalkDir(files, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		content, err := fs.ReadFile(files, name)
		t.addFile(name, 0o644, content)
		return err
	})
}

// archive is what write writes.
func (t tree) archive() ([]byte, error) {
	var out bytes.Buffer
	err := t.write(&out)
	return out.Bytes(), err
}

// completeDirectories adds the directories of entries that are not listed themselves.
func (t tree) completeDirectories() {
	for _, name := range slices.Collect(maps.Keys(t)) {
		for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
			if _, ok := t[dir]; !ok {
				t.add(tar.Header{Typeflag: tar.TypeDir, Name: dir, Mode: 0o755}, nil)
			}
		}
	}
}
