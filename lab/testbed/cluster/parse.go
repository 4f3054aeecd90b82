package cluster

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	yamlutil "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

// Manifest is the content of a file: YAML or JSON, with any number of documents.
type Manifest struct {
	Name string
	Data []byte
}

// Load reads files, and the YAML and JSON files of directories. "-" is the standard input.
func Load(paths ...string) ([]Manifest, error) {
	var all []Manifest
	for _, path := range paths {
		files := []string{path}
		if info, err := os.Stat(path); err == nil && info.IsDir() {
			if files, err = manifestsIn(path); err != nil {
				return nil, err
			}
		}
		for _, file := range files {
			data, err := read(file)
			if err != nil {
				return nil, fmt.Errorf("read manifests: %w", err)
			}
			all = append(all, Manifest{file, data})
		}
	}
	return all, nil
}

func read(file string) ([]byte, error) {
	if file == "-" {
		return io.ReadAll(os.Stdin)
	}
	return os.ReadFile(file)
}

func manifestsIn(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("read manifests: %w", err)
	}
	var files []string
	for _, e := range entries {
		if !e.IsDir() && slices.Contains([]string{".yaml", ".yml", ".json"}, filepath.Ext(e.Name())) {
			files = append(files, filepath.Join(dir, e.Name()))
		}
	}
	return files, nil
}

// object is the identity of an object and where it was read.
type object struct {
	file      string
	line      int // of the document
	document  int
	kind      string
	namespace string
	name      string
}

func (o object) String() string { return o.kind + " " + o.namespace + "/" + o.name }

// key is namespace/name.
func (o object) key() string { return o.namespace + "/" + o.name }

func (o object) problem(err error) Problem {
	p := Problem{File: o.file, Line: o.line, Document: o.document, Reason: err.Error()}
	if o.kind != "" {
		p.Object = o.String()
	}
	return p
}

// unparsed is the problem of a text that is no YAML. The parser counts lines from where the document
// begins: the line of the mistake or that on which the block around it begins.
func (o object) unparsed(err error) Problem {
	message, line := strings.TrimPrefix(err.Error(), "yaml: "), 1
	if _, err := fmt.Sscanf(message, "line %d:", &line); err == nil {
		_, message, _ = strings.Cut(message, ": ")
	}
	if strings.HasPrefix(message, "did not find expected") {
		line++ // the parser, unlike the scanner below it, counts from zero
	}
	o.line += line - 1
	return o.problem(fmt.Errorf("does not parse: %s", message))
}

// workload is whatever makes pods from a template, of whatever kind; also a single Pod.
type workload struct {
	object
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		Replicas *int32                 `json:"replicas"`
		Template corev1.PodTemplateSpec `json:"template"`
	} `json:"spec"`
	status corev1.PodStatus // of a Pod
}

// order puts workloads first whose pods' names are promised.
func (w *workload) order() int {
	switch w.kind {
	case "Pod":
		return 0
	case "StatefulSet":
		return 1
	}
	return 2
}

// input is what the manifests say.
type input struct {
	services  []*service
	workloads []*workload
	slices    map[string][]*discoveryv1.EndpointSlice // by Service
	mirrored  map[string][]*discoveryv1.EndpointSlice // made from Endpoints, where there are no real ones
	owners    map[types.UID]bool                      // objects that others may name as theirs
	seen      map[string]bool
	skipped   map[string]int
	problems  []Problem
}

func parse(manifests []Manifest) *input {
	in := &input{
		slices:   map[string][]*discoveryv1.EndpointSlice{},
		mirrored: map[string][]*discoveryv1.EndpointSlice{},
		owners:   map[types.UID]bool{},
		seen:     map[string]bool{},
		skipped:  map[string]int{},
	}
	for _, m := range manifests {
		in.file(m)
	}
	// Objects that another object of the manifests controls come with it: "kubectl get all" lists Deployments, their
	// ReplicaSets and the Pods of these.
	in.workloads = slices.DeleteFunc(in.workloads, func(w *workload) bool {
		owner := metav1.GetControllerOfNoCopy(w)
		return owner != nil && in.owners[owner.UID]
	})
	for key, mirrored := range in.mirrored {
		if in.slices[key] == nil {
			in.slices[key] = mirrored
		}
	}
	slices.SortFunc(in.services, func(a, b *service) int { return cmp.Compare(a.key(), b.key()) })
	slices.SortStableFunc(in.workloads, func(a, b *workload) int {
		return cmp.Or(cmp.Compare(a.order(), b.order()), cmp.Compare(a.key(), b.key()))
	})
	return in
}

// Objects are the Services and EndpointSlices of manifests, unchanged, and the problems of objects that were not read.
func Objects(manifests []Manifest) (objects []runtime.Object, problems []Problem) {
	in := parse(manifests)
	for _, s := range in.services {
		s.Namespace = s.object.namespace
		objects = append(objects, &s.Service)
	}
	for _, key := range slices.Sorted(maps.Keys(in.slices)) {
		for _, slice := range in.slices[key] {
			objects = append(objects, slice)
		}
	}
	return objects, in.problems
}

func (in *input) file(m Manifest) {
	documents := yamlutil.NewYAMLReader(bufio.NewReader(bytes.NewReader(m.Data)))
	for o, end := (object{file: m.Name}), 0; ; {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return
		}
		for _, text := range split(document) {
			// The reader cuts the file at its marks and leaves them out.
			begin := end + max(bytes.Index(m.Data[end:], text), 0)
			end = begin + len(text)
			o.document++
			o.line = 1 + bytes.Count(m.Data[:begin], []byte("\n"))
			data := text
			if err == nil && !json.Valid(text) {
				data, err = yaml.YAMLToJSON(text)
			}
			if err != nil {
				in.problems = append(in.problems, o.unparsed(err))
			} else if string(data) != "null" { // only comments
				in.add(o, "", data)
			}
		}
	}
}

// split returns the JSON values that follow one another in a document, or the document if it is not JSON.
func split(document []byte) (values [][]byte) {
	decoder := json.NewDecoder(bytes.NewReader(document))
	for {
		var value json.RawMessage
		if err := decoder.Decode(&value); err != nil && (!errors.Is(err, io.EOF) || values == nil) {
			return [][]byte{document}
		} else if err != nil {
			return values
		}
		values = append(values, value)
	}
}

// add takes one object, or each of a list.
func (in *input) add(o object, apiVersion string, data []byte) {
	var head struct {
		metav1.TypeMeta
		Metadata metav1.ObjectMeta `json:"metadata"`
		Items    []json.RawMessage `json:"items"`
	}
	err := errors.New("is not a Kubernetes object")
	if data[0] == '{' {
		err = json.Unmarshal(data, &head)
	}
	head.APIVersion, o.kind = cmp.Or(head.APIVersion, apiVersion), cmp.Or(head.Kind, o.kind)
	o.namespace, o.name = cmp.Or(head.Metadata.Namespace, metav1.NamespaceDefault), head.Metadata.Name
	switch {
	case err != nil:
	case o.kind == "":
		err = errors.New("has no kind")
	case strings.HasSuffix(o.kind, "List") && head.Items != nil:
		of := object{file: o.file, line: o.line, document: o.document, kind: strings.TrimSuffix(o.kind, "List")}
		for _, item := range head.Items { // which may do without what the list's own kind says
			in.add(of, head.APIVersion, item)
		}
		return
	case in.seen[head.APIVersion+" "+o.String()]:
		err = errors.New("is there already; the first is taken")
	default:
		in.seen[head.APIVersion+" "+o.String()] = true
		if head.Metadata.UID != "" {
			in.owners[head.Metadata.UID] = true
		}
		err = in.decode(o, head.APIVersion, data)
	}
	if err != nil {
		in.problems = append(in.problems, o.problem(err))
	}
}

func (in *input) decode(o object, apiVersion string, data []byte) error {
	switch apiVersion + " " + o.kind {
	case "v1 Service":
		s := &service{object: o}
		if err := json.Unmarshal(data, &s.Service); err != nil {
			return err
		}
		in.services = append(in.services, s)
		return nil
	case "v1 Endpoints":
		return in.addEndpoints(o, data)
	case "discovery.k8s.io/v1 EndpointSlice":
		return in.addSlice(data)
	case "v1 Pod":
		var p corev1.Pod
		if err := json.Unmarshal(data, &p); err != nil {
			return err
		}
		w := &workload{object: o, ObjectMeta: p.ObjectMeta, status: p.Status}
		w.Spec.Template = corev1.PodTemplateSpec{ObjectMeta: p.ObjectMeta, Spec: p.Spec}
		in.workloads = append(in.workloads, w)
		return nil
	case "batch/v1 Job": // its pods end
		in.skipped[o.kind]++
		return nil
	}
	return in.addWorkload(o, data)
}

// addWorkload takes anything that has a template of pods with containers.
func (in *input) addWorkload(o object, data []byte) error {
	var shape struct {
		Spec struct {
			Template struct {
				Spec struct {
					Containers []json.RawMessage `json:"containers"`
				} `json:"spec"`
			} `json:"template"`
		} `json:"spec"`
	}
	if err := json.Unmarshal(data, &shape); err != nil || len(shape.Spec.Template.Spec.Containers) == 0 {
		in.skipped[o.kind]++ // its spec means something else
		return nil
	}
	w := &workload{object: o}
	if err := json.Unmarshal(data, w); err != nil {
		return err
	}
	in.workloads = append(in.workloads, w)
	return nil
}
