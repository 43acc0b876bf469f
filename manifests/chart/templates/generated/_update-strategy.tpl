{{- /* Made from manifests/daemonset.yaml by scripts/generate. */}}
{{- define "vgpu-agent.updateStrategy" -}}
type: RollingUpdate
rollingUpdate:
  maxSurge: 10%
  maxUnavailable: 0
{{- end }}
