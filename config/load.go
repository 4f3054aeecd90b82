package config

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubeproxy "k8s.io/kube-proxy/config/v1alpha1"
)

const kubeProxyKind = "KubeProxyConfiguration"

func kubeProxyTypeMeta() metav1.TypeMeta {
	return metav1.TypeMeta{Kind: kubeProxyKind, APIVersion: kubeproxy.SchemeGroupVersion.String()}
}

// Load reads the files that the flags name and says what is to be done. An error has a line for each
// thing that is wrong.
func (f *Flags) Load() (*Config, error) {
	c := &Config{KubeProxy: *f.kubeProxy(), Fairlead: f.said.fairlead}
	setModeDefaults(&c.KubeProxy)
	c.Plane = planeFor(c.KubeProxy.Mode, f.planes)
	gates, err := newGates(c.KubeProxy.FeatureGates)
	c.gates = gates
	return c, err
}
