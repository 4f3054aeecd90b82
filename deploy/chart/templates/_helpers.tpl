{{- define "fairlead.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "fairlead.selectorLabels" -}}
app.kubernetes.io/name: fairlead
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "fairlead.labels" -}}
{{ include "fairlead.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end -}}

{{- define "fairlead.windowsSelectorLabels" -}}
app.kubernetes.io/name: fairlead-windows
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "fairlead.windowsLabels" -}}
{{ include "fairlead.windowsSelectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end -}}

{{- define "fairlead.healthSelectorLabels" -}}
app.kubernetes.io/name: fairlead-health
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "fairlead.healthLabels" -}}
{{ include "fairlead.healthSelectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end -}}

{{- define "fairlead.serviceAccount" -}}
{{- if .Values.serviceAccount.name -}}
{{- .Values.serviceAccount.name -}}
{{- else if .Values.serviceAccount.create -}}
{{- include "fairlead.fullname" . -}}
{{- else -}}
{{- fail "serviceAccount.name: name the account, as serviceAccount.create is false" -}}
{{- end -}}
{{- end -}}

{{/* The reference of an image: (list . .Values.image). */}}
{{- define "fairlead.image" -}}
{{- $image := last . -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository ($image.tag | default (printf "v%s" (first .).Chart.AppVersion)) -}}
{{- end -}}
{{- end -}}

{{/* Not empty if the chart writes KubeProxyConfiguration, and the ConfigMap of kube-proxy does not. */}}
{{- define "fairlead.writesConfig" -}}
{{- if or .Values.apiServer .Values.config -}}yes{{- end -}}
{{- end -}}

{{/* The sources of the volume with the configuration: what the chart does not write comes from kube-proxy's ConfigMap. */}}
{{- define "fairlead.configSources" -}}
{{- if not .Values.apiServer -}}
- configMap:
    name: {{ .Values.existingConfigMap }}
    {{- if include "fairlead.writesConfig" . }}
    items: [{key: kubeconfig.conf, path: kubeconfig.conf}]
    {{- end }}
{{ end -}}
- configMap:
    name: {{ include "fairlead.fullname" . }}
{{- end -}}

{{/* kube-proxy's configuration, with what only the chart knows. */}}
{{- define "fairlead.config" -}}
{{- $own := dict "apiVersion" "kubeproxy.config.k8s.io/v1alpha1" "kind" "KubeProxyConfiguration" "mode" "nftables" -}}
{{- $own = set $own "clientConnection" (dict "kubeconfig" "/var/lib/kube-proxy/kubeconfig.conf") -}}
{{- if .Values.podMonitor.enabled -}}
{{- /* 0.0.0.0 has no addresses of IPv6, which may be all that the pods have. */ -}}
{{- $all := ternary "[::]" "0.0.0.0" (contains ":" (get .Values.config "bindAddress")) -}}
{{- $own = set $own "metricsBindAddress" (printf "%s:%v" $all .Values.metricsPort) -}}
{{- end -}}
{{- /* The kubelet gives pods of this priority the score -997, below which nobody without CAP_SYS_RESOURCE gets. */ -}}
{{- $own = set $own "oomScoreAdj" -997 -}}
{{- toYaml (mergeOverwrite $own (deepCopy .Values.config)) -}}
{{- end -}}

{{/* What Windows nodes have of it: not the mode of the others, nor what is for Linux alone. */}}
{{- define "fairlead.windowsConfig" -}}
{{- $common := omit (fromYaml (include "fairlead.config" .)) "mode" "oomScoreAdj" "conntrack" "iptables" "ipvs" "nftables" -}}
{{- toYaml (mergeOverwrite $common (deepCopy .Values.windows.config) (dict "mode" "kernelspace")) -}}
{{- end -}}

{{/* Not empty if the pods may run in a mode: (list . "ebpf"). Mode auto may choose any. */}}
{{- define "fairlead.runs" -}}
{{- $values := (first .).Values -}}
{{- $modes := append $values.modes (get $values.config "mode") -}}
{{- if or (has (last .) $modes) (has "auto" $modes) -}}yes{{- end -}}
{{- end -}}

{{- define "fairlead.ebpf" -}}
{{- include "fairlead.runs" (list . "ebpf") -}}
{{- end -}}

{{/* What the daemon may, of all that root may. docs/install.md says what for; tests run each mode with these alone. */}}
{{- define "fairlead.capabilities" -}}
- NET_ADMIN
{{- if include "fairlead.runs" (list . "userspace") }}
- NET_BIND_SERVICE
{{- end }}
{{- if include "fairlead.ebpf" . }}
- BPF
- PERFMON
- SYS_ADMIN
{{- if .Values.linuxBefore511 }}
- SYS_RESOURCE
{{- end }}
{{- end }}
{{- end -}}

{{- define "fairlead.fairleadConfig" -}}
{{- $own := dict "apiVersion" "fairlead.dev/v1alpha1" "kind" "FairleadConfiguration" -}}
{{- if include "fairlead.ebpf" . -}}
{{- /* Not /sys/fs/bpf: AppArmor's profiles for containers let nobody write there. */ -}}
{{- $own = set $own "ebpf" (dict "bpfRoot" "/host/bpf") -}}
{{- end -}}
{{- if .Values.healthResponder.enabled -}}
{{- $own = set $own "healthCheckMaxAge" .Values.healthResponder.maxAge -}}
{{- end -}}
{{- toYaml (mergeOverwrite $own (deepCopy .Values.fairleadConfig)) -}}
{{- end -}}

{{- define "fairlead.args" -}}
- run
- --config=/var/lib/kube-proxy/config.conf
- --fairlead-config=/var/lib/kube-proxy/fairlead.conf
- --hostname-override=$(NODE_NAME)
{{- with .Values.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "fairlead.env" -}}
- name: NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
{{- end -}}

{{/* What mode ebpf needs to see of the machine beside the file system for its pins. The root of the machine's cgroups
is found wherever it is mounted. */}}
{{- define "fairlead.ebpfVolumes" -}}
- name: cgroup
  hostPath:
    path: /sys/fs/cgroup
- name: netns
  hostPath:
    path: /run/netns
    type: DirectoryOrCreate
- name: docker-netns
  hostPath:
    path: /run/docker/netns
    type: DirectoryOrCreate
{{- end -}}

{{- define "fairlead.ebpfMounts" -}}
- name: cgroup
  mountPath: /host/cgroup
  readOnly: true
  mountPropagation: HostToContainer
# Where sockets of pods are told that their backend is gone; cri-dockerd has namespaces of its own.
- name: netns
  mountPath: /run/netns
  readOnly: true
  mountPropagation: HostToContainer
- name: docker-netns
  mountPath: /run/docker/netns
  readOnly: true
  mountPropagation: HostToContainer
{{- end -}}
