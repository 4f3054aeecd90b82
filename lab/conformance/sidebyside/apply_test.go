package sidebyside

import (
	"context"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clientset "k8s.io/client-go/kubernetes"

	"fairlead.dev/fairlead/lab/testbed"
)

// api is the API server, and what was written to it.
type api struct {
	client clientset.Interface
	has    objects
}

// apply makes the API server hold exactly these objects. It does not write unchanged objects again.
func (a *api) apply(ctx context.Context, want objects) error {
	if err := a.delete(ctx, want); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(want.services)) {
		if s := want.services[name]; s != a.has.services[name] {
			if err := a.writeService(ctx, s); err != nil {
				return fmt.Errorf("service %s: %w", name, err)
			}
			a.has.services[name] = s
		}
	}
	for _, name := range slices.Sorted(maps.Keys(want.slices)) {
		if s := want.slices[name]; s != a.has.slices[name] {
			if err := a.writeSlice(ctx, s); err != nil {
				return fmt.Errorf("slice %s: %w", name, err)
			}
			a.has.slices[name] = s
		}
	}
	if want.zone != a.has.zone {
		if err := a.writeZone(ctx, want.zone); err != nil {
			return err
		}
		a.has.zone = want.zone
	}
	return nil
}

// delete removes what is not wanted, slices whose family is another one now among it.
func (a *api) delete(ctx context.Context, want objects) error {
	for name := range a.has.slices {
		if want.slices[name] != nil {
			continue
		}
		err := a.client.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).Delete(ctx, name, metav1.DeleteOptions{})
		if err != nil {
			return err
		}
		delete(a.has.slices, name)
	}
	for name := range a.has.services {
		if want.services[name] != nil {
			continue
		}
		err := a.client.CoreV1().Services(metav1.NamespaceDefault).Delete(ctx, name, metav1.DeleteOptions{})
		if err != nil {
			return err
		}
		delete(a.has.services, name)
	}
	return nil
}

func (a *api) writeService(ctx context.Context, s *corev1.Service) error {
	client := a.client.CoreV1().Services(metav1.NamespaceDefault)
	next := s.DeepCopy()
	if a.has.services[s.Name] == nil {
		made, err := client.Create(ctx, next, metav1.CreateOptions{})
		if err != nil {
			return err
		}
		next.ResourceVersion = made.ResourceVersion
	} else {
		now, err := client.Get(ctx, s.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		next.ResourceVersion = now.ResourceVersion
		made, err := client.Update(ctx, next, metav1.UpdateOptions{})
		if err != nil {
			return err
		}
		next.ResourceVersion = made.ResourceVersion
	}
	if s.Spec.Type != corev1.ServiceTypeLoadBalancer {
		return nil
	}
	_, err := client.UpdateStatus(ctx, next, metav1.UpdateOptions{})
	return err
}

func (a *api) writeSlice(ctx context.Context, s *discoveryv1.EndpointSlice) error {
	client := a.client.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault)
	if a.has.slices[s.Name] == nil {
		_, err := client.Create(ctx, s, metav1.CreateOptions{})
		return err
	}
	_, err := client.Update(ctx, s, metav1.UpdateOptions{})
	return err
}

func (a *api) writeZone(ctx context.Context, zone string) error {
	value := "null"
	if zone != "" {
		value = fmt.Sprintf("%q", zone)
	}
	patch := fmt.Sprintf(`{"metadata":{"labels":{%q:%s}}}`, corev1.LabelTopologyZone, value)
	_, err := a.client.CoreV1().Nodes().Patch(ctx, string(testbed.Node), types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	return err
}
