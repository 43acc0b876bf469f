{{- /* Made from manifests/daemonset.yaml by scripts/generate. */}}
{{- define "vgpu-agent.updateStrategy" -}}
type: RollingUpdate
rollingUpdate:
  maxUnavailable: 10%
{{- end }}
