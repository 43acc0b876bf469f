"""AWS's virtual GPUs: `k8s.amazonaws.com/vgpu`."""
