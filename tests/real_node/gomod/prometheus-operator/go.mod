module vgpu-agent.invalid/cluster/prometheus-operator

go 1.26.0

// Only its CustomResourceDefinitions are used; nothing of it is built.
require github.com/prometheus-operator/prometheus-operator v0.92.1
