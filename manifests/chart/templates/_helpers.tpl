{{/* The name of the agent's objects, and the beginning of those of its webhook. */}}
{{- define "vgpu-agent.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $full .Values.fullnameOverride | trunc 45 | trimSuffix "-" -}}
{{- end }}

{{- define "vgpu-agent.namespace" -}}
{{- default .Release.Namespace .Values.namespaceOverride -}}
{{- end }}

{{/* Labels by which Helm's tools find objects. None of them is in a selector: these never change. */}}
{{- define "vgpu-agent.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
{{- end }}

{{/* The image of the agent, its scheduler and its webhook. */}}
{{- define "vgpu-agent.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end }}

{{/* The list strategies of the values, as one text with commas. */}}
{{- define "vgpu-agent.listStrategy" -}}
{{- $commands := dig "devicePlugin" "commands" dict .Values.devicePlugin -}}
{{- $chosen := coalesce .Values.deviceListStrategy $commands.deviceListStrategy (ternary .Values.cdi.deviceListStrategy nil .Values.cdi.enabled) -}}
{{- if kindIs "slice" $chosen }}{{ join "," $chosen }}{{ else }}{{ default "" $chosen }}{{ end -}}
{{- end }}

{{- define "vgpu-agent.migStrategy" -}}
{{- default "" (coalesce .Values.migStrategy (dig "devicePlugin" "commands" "migStrategy" nil .Values.devicePlugin)) -}}
{{- end }}

{{- define "vgpu-agent.driverRoot" -}}
{{- coalesce .Values.nvidiaDriverRoot .Values.devicePlugin.driverRoot (ternary .Values.cdi.nvidiaDriverRoot nil .Values.cdi.enabled) "/" -}}
{{- end }}

{{- define "vgpu-agent.kubeletRoot" -}}
{{- coalesce .Values.devicePlugin.kubeletRoot .Values.devicePlugin.kubeletRootDir "/var/lib/kubelet" -}}
{{- end }}

{{- define "vgpu-agent.managerRoot" -}}
{{- coalesce .Values.devicePlugin.managerRoot .Values.devicePlugin.vgpuManagerDir "/etc/vgpu-manager" -}}
{{- end }}

{{/* The ConfigMap with named configurations, "" where there is none. */}}
{{- define "vgpu-agent.namedConfig" -}}
{{- if .Values.config.map }}{{ include "vgpu-agent.fullname" . }}-configs
{{- else }}{{ .Values.config.name | default (ternary "nvidia-device-plugin-config" "" (index .Values.components "nvidia-config")) }}
{{- end }}
{{- end }}

{{/*
"true" where a component is on, "" otherwise: (list . NAME). A value under which the same is known
elsewhere counts as well.
*/}}
{{- define "vgpu-agent.on" -}}
{{- $root := index . 0 }}{{ $name := index . 1 -}}
{{- $values := $root.Values -}}
{{- $by := dict
  "scheduler" $values.scheduler.enabled
  "webhook" $values.webhook.enabled
  "mig-monitor" (has (include "vgpu-agent.migStrategy" $root) (list "single" "mixed"))
  "cdi" (contains "cdi-" (include "vgpu-agent.listStrategy" $root))
  "nvidia-config" (or $values.config.map $values.config.name)
  "vgpu-manager-config" (get $values.devicePlugin "nodeConfig")
-}}
{{- if or (index $values.components $name) (get $by $name) }}true{{ end -}}
{{- end }}

{{/* The image of kube-scheduler: the version of the API server, unless another is named. */}}
{{- define "vgpu-agent.kubeSchedulerTag" -}}
{{- default (regexFind "^v[0-9]+[.][0-9]+[.][0-9]+" .Capabilities.KubeVersion.Version) .Values.scheduler.kubeScheduler.imageTag -}}
{{- end }}

{{/* The minor version of kube-scheduler, by its tag; where that names none, that of the API server. */}}
{{- define "vgpu-agent.kubeSchedulerMinor" -}}
{{- $version := "^v?1[.][0-9]+" -}}
{{- $found := coalesce (regexFind $version (include "vgpu-agent.kubeSchedulerTag" .)) (regexFind $version .Capabilities.KubeVersion.Version) -}}
{{- regexFind "[0-9]+$" $found -}}
{{- end }}

{{/* Mistakes that the schema cannot see. */}}
{{- define "vgpu-agent.check" -}}
{{- range $name, $other := dict "region-slots" "hami-core" "hami-core-library" "hami-core" "vgpu-control-slots" "vgpu-control" "vgpu-control-library" "vgpu-control" }}
{{- if and (include "vgpu-agent.on" (list $ $name)) (not (include "vgpu-agent.on" (list $ $other))) }}
{{- fail (printf "components.%s needs the folder of components.%s: set that one, too" $name $other) }}
{{- end }}
{{- end }}
{{- range $component, $image := dict "hami-core-library" "hami-core-library" "vgpu-control-library" "vgpu-control-library" "mig" "mig-parted" }}
{{- if and (include "vgpu-agent.on" (list $ $component)) (not (index $.Values.images $image).repository) }}
{{- fail (printf "components.%s takes its files from an image of yours: name it in images.%s.repository" $component $image) }}
{{- end }}
{{- end }}
{{- if and .Values.config.map .Values.config.name }}
{{- fail "config.map makes a ConfigMap and config.name takes one of yours: set one of them" }}
{{- end }}
{{- if and (include "vgpu-agent.on" (list . "scheduler")) (not .Values.scheduler.kubeScheduler.image) }}
{{- fail "scheduler.kubeScheduler.image is empty: name an image of kube-scheduler" }}
{{- end }}
{{- if and (include "vgpu-agent.on" (list . "scheduler")) (lt (atoi (include "vgpu-agent.kubeSchedulerMinor" .)) 20) }}
{{- fail (printf "scheduler.kubeScheduler.imageTag is %s: name a kube-scheduler 1.20 or newer" (include "vgpu-agent.kubeSchedulerTag" .)) }}
{{- end }}
{{- end }}

{{- define "vgpu-agent.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "vgpu-agent.unprivileged" -}}
runAsUser: 0
runAsGroup: 0
privileged: false
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: ["ALL"]
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* The variables that values of the replaced plugins' charts stand for, as these plugins had them. */}}
{{- define "vgpu-agent.variables" -}}
{{- $commands := dig "devicePlugin" "commands" dict .Values.devicePlugin -}}
{{- $found := dict
  "MIG_STRATEGY" (include "vgpu-agent.migStrategy" .)
  "FAIL_ON_INIT_ERROR" .Values.failOnInitError
  "DEVICE_LIST_STRATEGY" (include "vgpu-agent.listStrategy" .)
  "DEVICE_ID_STRATEGY" .Values.deviceIDStrategy
  "NVIDIA_DEV_ROOT" .Values.nvidiaDevRoot
  "GDRCOPY_ENABLED" .Values.gdrcopyEnabled
  "GDS_ENABLED" (ternary $commands.gdsEnabled .Values.gdsEnabled (kindIs "invalid" .Values.gdsEnabled))
  "MOFED_ENABLED" (ternary $commands.mofedEnabled .Values.mofedEnabled (kindIs "invalid" .Values.mofedEnabled))
  "DEVICE_DISCOVERY_STRATEGY" .Values.deviceDiscoveryStrategy
  "NVIDIA_CDI_HOOK_PATH" .Values.cdi.nvidiaHookPath
  "CDI_FEATURE_FLAGS" .Values.cdi.featureFlags
  "NVIDIA_DRIVER_RESOURCE_CONFIG" .Values.resourceConfig
  "VGPU_AGENT_DEVICE_SPLIT_COUNT" $commands.deviceSplitCount
  "VGPU_AGENT_DEVICE_CORES_SCALING" $commands.deviceCoresScaling
  "VGPU_AGENT_DEVICE_MEMORY_SCALING" $commands.deviceMemoryScaling
  "VGPU_AGENT_DEVICE_MEMORY_FACTOR" $commands.deviceMemoryFactor
  "VGPU_AGENT_EXCLUDE_DEVICES" $commands.excludeDevices
  "VGPU_AGENT_FEATURE_GATES" $commands.featureGates
  "VGPU_AGENT_OPEN_KERNEL_MODULES" $commands.openKernelModules
-}}
{{- if .Values.compatWithCPUManager }}{{ $_ := set $found "PASS_DEVICE_SPECS" true }}{{ end -}}
{{- if ne (include "vgpu-agent.driverRoot" .) "/" }}{{ $_ := set $found "NVIDIA_DRIVER_ROOT" (include "vgpu-agent.driverRoot" .) }}{{ end -}}
{{- if ne (include "vgpu-agent.kubeletRoot" .) "/var/lib/kubelet" }}{{ $_ := set $found "VGPU_AGENT_KUBELET_DIR" (include "vgpu-agent.kubeletRoot" .) }}{{ end -}}
{{- if ne (include "vgpu-agent.managerRoot" .) "/etc/vgpu-manager" }}{{ $_ := set $found "HOST_MANAGER_DIR" (include "vgpu-agent.managerRoot" .) }}{{ end -}}
{{- if ne .Values.hostPaths.vgpuLib "/usr/local/vgpu" }}{{ $_ := set $found "HOOK_PATH" .Values.hostPaths.vgpuLib }}{{ end -}}
{{- if ne .Values.mps.root "/run/nvidia/mps" }}{{ $_ := set $found "MPS_ROOT" .Values.mps.root }}{{ end -}}
{{- if ne .Values.globalDomain "nvidia.com" }}{{ $_ := set $found "VGPU_AGENT_DOMAIN" .Values.globalDomain }}{{ end -}}
{{- if include "vgpu-agent.on" (list . "nvidia-config") }}
{{- $_ := set $found "CONFIG_FILE_SRCDIR" "/available-configs" }}
{{- if .Values.config.default }}{{ $_ := set $found "DEFAULT_CONFIG" .Values.config.default }}{{ end }}
{{- if .Values.config.fallbackStrategies }}{{ $_ := set $found "FALLBACK_STRATEGIES" (join "," .Values.config.fallbackStrategies) }}{{ end }}
{{- end }}
{{- $node := get .Values.devicePlugin "nodeConfig" }}
{{- if $node }}{{ $_ := set $found "VGPU_AGENT_NODE_CONFIG_PATH" (printf "/vgpu-manager-config/nodeConfig.%s" (ternary "yaml" "json" (hasKey $node "yaml"))) }}{{ end -}}
{{- range $name, $value := $found }}
{{- /* Helm reads every number as a float, and would print a large one with an exponent. */}}
{{- if kindIs "float64" $value }}{{ if eq (floor $value) $value }}{{ $value = int64 $value }}{{ end }}{{ end }}
{{- if not (or (kindIs "invalid" $value) (eq (toString $value) "")) }}
- name: {{ $name }}
  value: {{ toString $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* An image of yours: (list . NAME), NAME as in `images` of the kustomization. */}}
{{- define "vgpu-agent.otherImage" -}}
{{- $image := index (index . 0).Values.images (index . 1) -}}
{{ $image.repository }}{{ with $image.tag }}:{{ . }}{{ end }}
{{- end }}

{{/* What an init container that copies a file needs. */}}
{{- define "vgpu-agent.delivering" -}}
resources:
  requests:
    cpu: 10m
    memory: 16Mi
  limits:
    memory: 64Mi
securityContext:
  {{- include "vgpu-agent.unprivileged" . | nindent 2 }}
{{- end }}

{{/* The init container that mounts slots: (list . NAME BACKEND FOLDER). */}}
{{- define "vgpu-agent.slots" -}}
{{- $root := index . 0 -}}
- name: {{ index . 1 }}
  image: {{ include "vgpu-agent.image" $root }}
  {{- with $root.Values.image.pullPolicy }}
  imagePullPolicy: {{ . }}
  {{- end }}
  args: ["mount-regions", "--config", "/etc/vgpu-agent/config.yaml", "--count", "128", "--backend", {{ index . 2 | quote }}]
  resources:
    requests:
      cpu: 10m
      memory: 32Mi
    limits:
      memory: 128Mi
  securityContext:
    runAsUser: 0
    runAsGroup: 0
    privileged: true
    readOnlyRootFilesystem: true
  volumeMounts:
    - name: config
      mountPath: /etc/vgpu-agent
      readOnly: true
    - name: {{ index . 2 }}
      mountPath: {{ index . 3 }}
      mountPropagation: Bidirectional
{{- end }}
