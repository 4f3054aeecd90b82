package kube

import (
	"context"

	corev1 "k8s.io/api/core/v1"
)

// Services are all that there are, whole: what is watched keeps only what matters for the rows.
func (c *Client) Services(ctx context.Context) ([]corev1.Service, error) {
	var list corev1.ServiceList
	err := c.groups[corev1.SchemeGroupVersion].Get().Resource("services").Do(ctx).Into(&list)
	return list.Items, err
}

// ConfigMap is one, if the user of the kubeconfig may read it.
func (c *Client) ConfigMap(ctx context.Context, namespace, name string) (*corev1.ConfigMap, error) {
	var m corev1.ConfigMap
	r := c.groups[corev1.SchemeGroupVersion].Get().Namespace(namespace).Resource("configmaps").Name(name)
	return &m, r.Do(ctx).Into(&m)
}
