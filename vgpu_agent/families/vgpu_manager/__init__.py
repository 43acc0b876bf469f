"""`vgpu-manager`: shares of GPUs as coldzerofear/vgpu-manager gives them out."""
