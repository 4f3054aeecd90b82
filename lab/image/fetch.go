package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// mirrors are the URLs of each archive, the first one is asked first.
type mirrors map[string][]string

// mirrorVariable names a mirror for machines whose apt knows none of Debian, as on Ubuntu; the
// security archive is beside it.
const mirrorVariable = "FAIRLEAD_DEBIAN_MIRROR"

// aptMirrors are those that apt on this machine uses.
func aptMirrors(ctx context.Context) (mirrors, error) {
	found := mirrors{}
	if url := strings.TrimSuffix(os.Getenv(mirrorVariable), "/"); url != "" {
		found.add(url)
		found.add(url + "-security")
	}
	out, err := exec.CommandContext(ctx, "apt-get", "indextargets", "--no-release-info",
		"--format", "$(REPO_URI)", "Created-By: Packages").Output()
	if err != nil {
		return nil, fmt.Errorf("apt-get indextargets, which tells the mirrors of Debian: %w", err)
	}
	for line := range strings.Lines(string(out)) {
		found.add(strings.TrimSuffix(strings.TrimSpace(line), "/"))
	}
	if len(found["debian"]) == 0 || len(found["debian-security"]) == 0 {
		return found, fmt.Errorf("apt's sources on this machine name no mirror of both debian and debian-security; "+
			"set %s to the URL of one that ends in /debian", mirrorVariable)
	}
	return found, nil
}

// add takes a mirror for the archive that its name ends with, if it is one that HTTP reaches.
func (m mirrors) add(url string) {
	archive := url[strings.LastIndexByte(url, '/')+1:]
	if strings.HasPrefix(url, "http") && !slices.Contains(m[archive], url) {
		m[archive] = append(m[archive], url)
	}
}

// split finds which archive a URL belongs to, and the path below its root.
func (m mirrors) split(url string) (archive, path string) {
	for archive, roots := range m {
		for _, root := range roots {
			if path, ok := strings.CutPrefix(url, root+"/"); ok {
				return archive, path
			}
		}
	}
	return "", url
}

// fetcher gets packages, from the cache if they are there. Each returned package has the sha256 of the lock.
type fetcher struct {
	cache    string
	mirrors  mirrors
	snapshot string
	client   http.Client
}

func newFetcher(ctx context.Context, cache, snapshot string) (*fetcher, error) {
	found, err := aptMirrors(ctx)
	if found == nil {
		return nil, err
	}
	// A machine without mirrors of Debian still has the snapshots.
	return &fetcher{cache, found, snapshot, http.Client{Timeout: 5 * time.Minute}}, os.MkdirAll(cache, 0o755)
}

// fetch returns the name of the package's file in the cache.
func (f *fetcher) fetch(ctx context.Context, p file) (string, error) {
	name := filepath.Join(f.cache, p.SHA256+".deb")
	if content, err := os.ReadFile(name); err == nil && verify(p, content) == nil {
		return name, nil
	}
	var errs []error
	for _, url := range f.urls(p) {
		content, err := f.get(ctx, url)
		if err == nil {
			err = verify(p, content)
		}
		if err == nil {
			return name, replace(name, content)
		}
		errs = append(errs, fmt.Errorf("  %s: %w", url, err))
	}
	return "", fmt.Errorf("no mirror has %s %s any more; ./dev image-lock pins what there is today:\n%w",
		p.Name, p.Version, errors.Join(errs...))
}

func (f *fetcher) urls(p file) []string {
	var urls []string
	for _, root := range f.mirrors[p.Archive] {
		urls = append(urls, root+"/"+p.Path)
	}
	return append(urls, "https://snapshot.debian.org/archive/"+p.Archive+"/"+f.snapshot+"/"+p.Path)
}

func (f *fetcher) get(ctx context.Context, url string) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	response, err := f.client.Do(request)
	if err != nil {
		return nil, err
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode != http.StatusOK {
		return nil, errors.New(response.Status)
	}
	return io.ReadAll(response.Body)
}

func verify(p file, content []byte) error {
	sum := sha256.Sum256(content)
	want, err := hex.DecodeString(p.SHA256)
	if err != nil || !bytes.Equal(sum[:], want) {
		return fmt.Errorf("its sha256 is %x, and the lock says %s", sum, p.SHA256)
	}
	return nil
}

// replace writes a file that other processes may be reading.
func replace(name string, content []byte) error {
	temporary := fmt.Sprintf("%s.%d", name, os.Getpid())
	if err := os.WriteFile(temporary, content, 0o644); err != nil {
		return err
	}
	return os.Rename(temporary, name)
}
