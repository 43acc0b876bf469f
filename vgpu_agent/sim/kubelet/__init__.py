"""A stand-in kubelet on another gRPC library than the agent's."""
