package kube

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"fairlead.dev/fairlead/service"
)

// compact is what remains of an object when it has arrived. To client-go it is an object like any
// other, so that the Reflector gathers these and never sees the whole ones. It is never changed.
type compact struct {
	name     service.Name
	version  string
	value    any // what the Batch will have; nil: the object does not concern a proxy
	problems []service.Problem
	uid      types.UID // if there are problems
	// listed marks the bookmark behind the last object of a streaming list.
	listed bool
}

// GetObjectMeta is made at each call: it would be most of what a compact object takes.
func (c *compact) GetObjectMeta() metav1.Object {
	m := &metav1.ObjectMeta{Namespace: c.name.Namespace, Name: c.name.Name, ResourceVersion: c.version}
	if c.listed {
		m.Annotations = map[string]string{metav1.InitialEventsAnnotationKey: "true"}
	}
	return m
}

func (c *compact) GetObjectKind() schema.ObjectKind { return schema.EmptyObjectKind }

func (c *compact) DeepCopyObject() runtime.Object { return c }

// compactList is a list, or a page of one.
type compactList struct {
	metav1.TypeMeta
	metav1.ListMeta
	Items []*compact // pointers: a page would live as long as one of its objects
}

func (l *compactList) DeepCopyObject() runtime.Object { return l }
