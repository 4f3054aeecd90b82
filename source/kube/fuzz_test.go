package kube

import (
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/watch"

	"fairlead.dev/fairlead/lab/allocs"
	"fairlead.dev/fairlead/service"
)

// FuzzObjects decodes arbitrary bytes as the client does, and takes them for objects of a list or of a watch of each
// kind. It must not panic, memory is bounded, and an object of another kind is an error.
func FuzzObjects(f *testing.F) {
	known, err := scheme()
	if err != nil {
		f.Fatal(err)
	}
	codecs := serializer.NewCodecFactory(known)
	info, _ := runtime.SerializerInfoForMediaType(codecs.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	for _, o := range []runtime.Object{
		aService("web", "10.96.0.1"), aSlice("web-1", "web", "10.0.0.1"), aNode("n1"), aCIDR("kubernetes", "10.96.0.0/16"),
	} {
		kinds, _, err := known.ObjectKinds(o)
		if err != nil {
			f.Fatal(err)
		}
		o.GetObjectKind().SetGroupVersionKind(kinds[0])
		text, err := runtime.Encode(info.Serializer, o)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	decoder := codecs.WithoutConversion().DecoderToVersion(info.Serializer, nil)
	f.Fuzz(func(t *testing.T, text []byte) {
		allocs.Bound(t, len(text), func() {
			if o, err := runtime.Decode(decoder, text); err == nil {
				take(t, o)
			}
		})
	})
}

// take gives an object to the watchers of all kinds.
func take(t *testing.T, o runtime.Object) {
	takers := 0
	for _, k := range kinds("n1") {
		s := &stream{watcher: &watcher{mirror: newMirror(k, nil)}}
		if c, err := s.reduce(o); err == nil {
			takers++
			s.put(&service.Batch{}, map[service.Name]any{c.name: c.value}, c.name)
			s.translate(t.Context(), watch.Event{Type: watch.Modified, Object: o})
			s.translate(t.Context(), watch.Event{Type: watch.Deleted, Object: o})
		}
		_, _ = s.compactList(o)
	}
	if takers > 1 {
		t.Errorf("%d kinds take a %T for theirs", takers, o)
	}
}
